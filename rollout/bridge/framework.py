"""slime's types and its event loop; without slime, our own of the same shape."""

import asyncio
import enum
import importlib.util
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from slime_verlog import MissingDependencyError

T = TypeVar("T")
CANCELLED_S = 10.0
"""Seconds that an interrupted coroutine gets to end."""


def _has_slime() -> bool:
    try:
        # Ask for slime's own types, because any folder named slime passes for an empty package.
        return importlib.util.find_spec("slime.utils.types") is not None
    except ModuleNotFoundError:
        return False


HAS_SLIME = _has_slime()

if TYPE_CHECKING or not HAS_SLIME:  # a type checker always sees these types

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

        def append_response_tokens(
            self,
            args: Any = None,
            *,
            tokens: Sequence[int] = (),
            log_probs: Sequence[float] | None = None,
            trainable: bool = True,
            meta_info: Mapping[str, Any] | None = None,
            text: str = "",
        ) -> None:
            """Append to the response, and record which weights wrote it and why it ended."""
            self.tokens = [*self.tokens, *tokens]
            self.response_length += len(tokens)
            self.loss_mask = [*(self.loss_mask or ()), *[int(trainable)] * len(tokens)]
            self.rollout_log_probs = [
                *(self.rollout_log_probs or ()),
                *(log_probs or [0.0] * len(tokens)),
            ]
            self.response += text
            if meta_info is not None:
                self._record(meta_info)

        def _record(self, meta_info: Mapping[str, Any]) -> None:
            version = meta_info.get("weight_version")
            versions: list[Any] = meta_info.get("weight_versions") or (
                [] if version is None else [version]
            )
            for found in versions:
                number = cast(Any, found)["version"] if isinstance(found, dict) else found
                self.weight_versions.append(str(number))
            reason: Any = meta_info.get("finish_reason")
            if isinstance(reason, dict):
                reason = cast(Any, reason)["type"]
            self.status = Sample.Status.TRUNCATED if reason == "length" else Sample.Status.COMPLETED

    @dataclass
    class RolloutFnTrainOutput:
        """What a training rollout returns: groups of samples, and metrics."""

        samples: list[list[Sample]]
        metrics: dict[str, Any] | None = None

    @dataclass
    class RolloutFnEvalOutput:
        """What an evaluation returns: per data set name, `rewards`, `truncated`, `samples`; and
        metrics."""

        data: dict[str, dict[str, Any]]
        metrics: dict[str, Any] | None = None

    _loop: asyncio.AbstractEventLoop | None = None
    _loop_lock = threading.Lock()

    def run(coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on a background event loop, which keeps running; Ctrl-C cancels it and
        waits for its end."""
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
    from slime.rollout.base_types import RolloutFnEvalOutput as RolloutFnEvalOutput
    from slime.rollout.base_types import RolloutFnTrainOutput as RolloutFnTrainOutput
    from slime.utils.async_utils import run as run
    from slime.utils.types import Sample as Sample

    if not hasattr(Sample, "append_response_tokens"):
        raise MissingDependencyError(
            "slime is too old: Sample has no append_response_tokens; take v0.3.1 or main"
        )


def outer_loop_is_full() -> bool | None:
    """Tell whether slime's own loop has enough samples and aborts the rest; None if slime's own
    loop does not run."""
    loop = sys.modules.get("slime.rollout.sglang_rollout")
    state = getattr(loop, "GenerateState", None)
    # From the singleton's registry, because a new instance would load a tokenizer.
    made = getattr(state, "_instances", {}).get(state)
    return None if made is None else bool(made.aborted)
