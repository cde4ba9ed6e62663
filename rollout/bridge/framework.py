"""Which RL framework is installed, and its few types; the one file that knows slime from miles.

slime >= v0.3.1 calls a training group's id `rollout_id`, v0.3.0 `group_id`, miles has none. With neither
installed, the types that the hooks need are defined here, with slime's field names.
"""

from __future__ import annotations

import asyncio
import enum
import importlib.util
import sys
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any


def _installed() -> str:
    for name in ("slime", "miles"):
        try:
            # The package's own types, since any folder of that name would pass for an empty package.
            if importlib.util.find_spec(f"{name}.utils.types") is not None:
                return name
        except ModuleNotFoundError:
            continue
    return "none"


FRAMEWORK: str = _installed()
"""`slime`, `miles` or `none`."""

if FRAMEWORK == "slime":
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
    from slime.utils.async_utils import run
    from slime.utils.types import Sample
elif FRAMEWORK == "miles":
    from miles.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
    from miles.utils.async_utils import run
    from miles.utils.types import Sample
else:

    @dataclass
    class Sample:
        """One training sample, with the fields of slime's `Sample` that the hooks read or write."""

        class Status(enum.Enum):
            PENDING = "pending"
            COMPLETED = "completed"
            TRUNCATED = "truncated"
            ABORTED = "aborted"
            FAILED = "failed"

        group_index: int | None = None
        index: int | None = None
        rollout_id: int | None = None
        prompt: str | list[dict[str, Any]] = ""
        tokens: list[int] = field(default_factory=list)
        multimodal_inputs: dict[str, Any] | None = None
        multimodal_train_inputs: dict[str, Any] | None = None
        response: str = ""
        response_length: int = 0
        label: str | None = None
        reward: float | None = None
        loss_mask: list[int] | None = None
        weight_versions: list[str] = field(default_factory=list)
        rollout_log_probs: list[float] | None = None
        remove_sample: bool = False
        status: Status = Status.PENDING
        metadata: dict[str, Any] = field(default_factory=dict)
        train_metadata: dict[str, Any] | None = None
        session_id: str | None = None
        non_generation_time: float = 0.0

    @dataclass
    class RolloutFnTrainOutput:
        """What a training rollout returns: groups of samples, and metrics."""

        samples: list[list[Sample]]
        metrics: dict[str, Any] | None = None

    @dataclass
    class RolloutFnEvalOutput:
        """What an evaluation returns: per data set name, `rewards`, `truncated`, `samples`; and metrics."""

        data: dict[str, dict[str, Any]]
        metrics: dict[str, Any] | None = None

    _loop: asyncio.AbstractEventLoop | None = None
    _loop_lock = threading.Lock()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on one background event loop, so that connections outlive the call."""
        global _loop
        with _loop_lock:
            if _loop is None:
                _loop = asyncio.new_event_loop()
                threading.Thread(target=_loop.run_forever, name="rollout-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, _loop).result()


_FIELDS = getattr(Sample, "__dataclass_fields__", {})

GROUP_FIELD: str | None = next((name for name in ("rollout_id", "group_id") if name in _FIELDS), None)
"""The Sample field that ties the samples of one training group together; None on miles."""


def set_group(sample: Sample, group: int) -> None:
    """Put the sample into the training group `group`, under whatever name this framework has for it."""
    if GROUP_FIELD is not None:
        setattr(sample, GROUP_FIELD, group)


def group_of(sample: Sample) -> int | None:
    """The training group of the sample; its index where the framework has no groups."""
    group = getattr(sample, GROUP_FIELD) if GROUP_FIELD is not None else None
    return sample.index if group is None else group


def train_data_keys() -> tuple[str, str] | None:
    """Names of the per-sample group ids and mask sums in the train data; None where there are none."""
    return {
        "rollout_id": ("rollout_ids", "rollout_mask_sums"),
        "group_id": ("group_ids", "group_mask_sums"),
    }.get(GROUP_FIELD or "")


__all__ = [
    "FRAMEWORK",
    "GROUP_FIELD",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "group_of",
    "run",
    "set_group",
    "train_data_keys",
]


def outer_loop_is_full() -> bool | None:
    """Whether slime's own loop has the batch it wanted and aborts what is still played; None where it does not run.

    It aborts the requests in flight; an episode whose environment is at work just then has none, and would go on to
    its end while everybody waits.
    """
    loop = sys.modules.get(f"{FRAMEWORK}.rollout.sglang_rollout")
    state = getattr(loop, "GenerateState", None)
    # Asked of the class's own registry, because making one loads a tokenizer.
    made = getattr(state, "_instances", {}).get(state)
    return None if made is None else bool(made.aborted)
