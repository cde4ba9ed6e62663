"""slime's own rollout loop against the simulated engines: `python -m benchmarks.slime_loop`, in slime's interpreter.

slime's `slime.rollout.sglang_rollout.generate_rollout` runs unchanged, with `rollout.generate.generate` playing the
episodes. Reads cases as JSON lines from stdin, and prints one JSON line per case.
"""

import contextlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.loops import MEAN_EPISODE, Case, Trainer, make_args, make_engines
from rollout.bridge.framework import run
from rollout.play.runtime import close_runtimes
from tests.fixtures.stand_ins import allow_absent_packages

LABELS = {
    "slime": "slime, default",
    "slime-partial": "slime, partial rollout, over-sampling by the places",
    "slime-double": "slime, partial rollout, over-sampling by 2",
}
ABSENT = (
    "custom_rm_path",
    "rm_type",
    "rm_url",
    "rollout_stop",
    "rollout_stop_token_ids",
    "rollout_sample_hook_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
)
OFF = (
    "mask_offpolicy_in_partial_rollout",
    "rollout_skip_special_tokens",
    "use_distributed_post",
    "group_rm",
    "ci_test",
)


def slime_args(case: Case, port: int, checkpoint: Path) -> Namespace:
    """Build the flags that slime's loop reads beside ours; batches are counted in episodes."""
    episodes = max(1, round(case.turns / MEAN_EPISODE))
    begun = {"slime": episodes, "slime-partial": episodes + case.slots, "slime-double": 2 * episodes}
    flags = {
        **dict.fromkeys(ABSENT),
        **dict.fromkeys(OFF, False),
        "rollout_batch_size": episodes,
        "global_batch_size": episodes,
        "over_sampling_batch_size": begun[case.loop],
        "partial_rollout": case.loop != "slime",
        "rollout_num_engines": case.engines,
        "sglang_dp_size": 1,
        "sglang_server_concurrency": 512,
        "rollout_global_dataset": True,
        "custom_generate_function_path": "rollout.generate.generate",
    }
    return make_args(case, port, checkpoint, **flags)


def run_case(case: Case, checkpoint: Path) -> dict[str, Any]:
    """Play one case."""
    from slime.rollout.sglang_rollout import GenerateState, generate_rollout
    from slime.utils import http_utils

    GenerateState.clear_instances()
    http_utils._http_client = None
    with make_engines(case, checkpoint) as engines, engines.sleeping():
        args = slime_args(case, engines.port, checkpoint)
        http_utils.init_http_client(args)
        trainer = Trainer(case, engines, args, generate_rollout)
        trainer.one_after_the_other()
        run(close_runtimes())
        return trainer.meter.row()


def main() -> None:
    allow_absent_packages()
    for line in sys.stdin:
        wanted = json.loads(line)
        checkpoint = Path(wanted.pop("checkpoint"))
        with contextlib.redirect_stdout(sys.stderr):
            row = run_case(Case(**wanted), checkpoint)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
