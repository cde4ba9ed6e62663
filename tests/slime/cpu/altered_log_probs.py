"""The project's converter, with every fourth of the rollout's log-probs changed by log 10, up and
down in turn."""

import math
from collections.abc import Sequence
from typing import Any

from rollout.samples import convert_samples_to_train_data

EVERY = 4
SHIFT = math.log(10)


def convert(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """What slime trains on; `tests.slime.test_off_policy` knows which tokens were changed."""
    data = convert_samples_to_train_data(args, samples)
    data["rollout_log_probs"] = [
        [x + (SHIFT if k % (2 * EVERY) else -SHIFT) * (k % EVERY == 0) for k, x in enumerate(row)]
        for row in data["rollout_log_probs"]
    ]
    return data
