"""Which RL framework is installed, and its types; the only file that tells slime from miles.

slime >= v0.3.1 calls a training group's id `rollout_id`, v0.3.0 calls it `group_id`, miles has none.
"""

import asyncio
import contextlib
import enum
import importlib
import importlib.util
import sys
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar


def _installed() -> str:
    for name in ("slime", "miles"):
        with contextlib.suppress(ModuleNotFoundError):
            # The package's own types, since any folder of that name would pass for an empty package.
            if importlib.util.find_spec(f"{name}.utils.types") is not None:
                return name
    return "none"


T = TypeVar("T")
CANCELLED_S = 10.0
"""Seconds that an interrupted coroutine gets to end."""
FRAMEWORK: str = _installed()
"""`slime`, `miles` or `none`."""

if TYPE_CHECKING or FRAMEWORK == "none":  # a type checker sees these types, whatever is installed

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
        rollout_top_p_token_ids: Any = None
        rollout_top_p_token_offsets: Any = None
        rollout_routed_experts: Any = None
        remove_sample: bool = False
        status: Status = Status.PENDING
        metadata: dict[str, Any] = field(default_factory=dict)
        train_metadata: dict[str, Any] | None = None
        session_id: str | None = None
        non_generation_time: float = 0.0

        def get_reward_value(self, args: Any) -> float:
            """The reward, which slime may also keep as one of several."""
            assert self.reward is not None
            return self.reward

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

    def run(coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on a background event loop, which keeps running; Ctrl-C cancels it and waits for its end."""
        global _loop
        with _loop_lock:
            if _loop is None:
                _loop = asyncio.new_event_loop()
                threading.Thread(target=_loop.run_forever, name="rollout-loop", daemon=True).start()
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await coro
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), _loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(CANCELLED_S)
            raise
else:
    _types = importlib.import_module(f"{FRAMEWORK}.rollout.base_types")
    RolloutFnTrainOutput, RolloutFnEvalOutput = _types.RolloutFnTrainOutput, _types.RolloutFnEvalOutput
    run = importlib.import_module(f"{FRAMEWORK}.utils.async_utils").run
    Sample = importlib.import_module(f"{FRAMEWORK}.utils.types").Sample

_FIELDS: Mapping[str, Any] = getattr(Sample, "__dataclass_fields__", {})

GROUP_FIELD: str | None = next((name for name in ("rollout_id", "group_id") if name in _FIELDS), None)
"""The Sample field that ties the samples of one training group together; None on miles."""


def set_group(sample: Sample, group: int) -> None:
    """Put the sample into the training group `group`; does nothing on miles."""
    if GROUP_FIELD is not None:
        setattr(sample, GROUP_FIELD, group)


def group_of(sample: Sample) -> int:
    """The sample's training group; its index if the framework has no groups, and 0 without either."""
    group = getattr(sample, GROUP_FIELD) if GROUP_FIELD is not None else None
    return (sample.index or 0) if group is None else group


def train_data_keys() -> tuple[str, str] | None:
    """Keys of the per-sample group ids and mask sums in the train data; None on miles."""
    name = (GROUP_FIELD or "").removesuffix("_id")
    return (f"{name}_ids", f"{name}_mask_sums") if name else None


def outer_loop_is_full() -> bool | None:
    """Tell whether slime's own loop has enough samples and aborts the rest; None if slime's own loop does not run."""
    loop = sys.modules.get(f"{FRAMEWORK}.rollout.sglang_rollout")
    state = getattr(loop, "GenerateState", None)
    # From the singleton's registry, because a new instance would load a tokenizer.
    made = getattr(state, "_instances", {}).get(state)
    return None if made is None else bool(made.aborted)
