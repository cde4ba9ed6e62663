"""What one run owns in this process: the parts that its episodes share, parked episodes, and the stream."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.bridge.checks import installs_advantages
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import FRAMEWORK
from rollout.bridge.sample import SampleWriter, is_traced
from rollout.bridge.settings import RolloutSettings, load_settings
from rollout.errors import ConfigError
from rollout.play.engine import EngineClient
from rollout.play.memory import build_memory
from rollout.play.parts import Parts
from rollout.play.slots import ParkedEpisodes
from rollout.tokens.encoding import DeltaEncoder
from rollout.workers.pool import EnvPool

if TYPE_CHECKING:
    from rollout.play.stream import Stream  # loaded by `rollout.continuous` alone


@dataclass
class Runtime(Parts):
    """Everything that one run owns in this process; `get_runtime` makes one per `args` and event loop."""

    samples: SampleWriter = field(kw_only=True)
    parked: ParkedEpisodes = field(default_factory=ParkedEpisodes)
    """Aborted episodes of slime's outer loop; empty under the fixed-turn rollout."""
    logged: Counter[str] = field(default_factory=Counter)
    """`fault_counts()` when the log hook last read them."""
    stream: Stream | None = None
    """The stream of continuous batches; None under other rollouts."""

    async def close(self) -> None:
        """Close the stream, the parked episodes, the workers and the connections."""
        if self.stream is not None:
            await self.stream.close()
        await self.parked.close()
        self.pool.close()
        await self.engine.close()


def build_runtime(args: Any) -> Runtime:
    """Make the parts from slime's `args`.

    Raises:
        ConfigError: a setting or flag is invalid.
        EncodingError: the tokenizer's chat template does not support the configured `history`.
    """
    settings, flags = load_settings(args), RolloutFlags.read(args)
    small = FRAMEWORK == "slime" and installs_advantages(args)
    make_encoder = encoders_of(flags.hf_checkpoint, settings, small_pictures=small)
    encoder = make_encoder()
    return Runtime(
        settings=settings,
        flags=flags,
        samples=SampleWriter(args, dummy_token=min(encoder.end_of_turn_ids)),
        encoder=encoder,
        make_encoder=make_encoder,
        engine=EngineClient(flags.engine_url, settings.engine),
        pool=EnvPool(settings),
        memory=build_memory(settings.memory),
        traced=is_traced(args),
    )


def encoders_of(
    checkpoint: str, settings: RolloutSettings, *, small_pictures: bool = False
) -> Callable[..., DeltaEncoder]:
    """A function from `tools` to the checkpoint's encoder under these settings.

    With `small_pictures`, training inputs hold PNG bytes, which `advantage.patch` expands on the training ranks.

    Raises:
        ConfigError: the checkpoint has no tokenizer that can be loaded.
    """
    tokenizer, processor = _load_tokenizer_and_processor(checkpoint)
    return partial(
        DeltaEncoder,
        tokenizer,
        processor,
        chat_template_kwargs=dict(settings.chat_template_kwargs),
        sanity_check=settings.tokenization_sanity_check,
        use_inference_chat_template=settings.use_inference_chat_template,
        history=settings.history,
        max_image_pixels=settings.max_image_pixels,
        small_pictures=small_pictures,
    )


def _load_tokenizer_and_processor(path: str) -> tuple[Any, Any]:
    """The checkpoint's tokenizer, and its image processor if it has one.

    Raises:
        ConfigError: `path` has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    from rollout.tokens.processor import load_processor

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    except (OSError, ValueError) as error:
        is_gone = path.startswith(("/", ".", "~")) and not Path(path).exists()
        reason = "the folder does not exist" if is_gone else str(error).strip().splitlines()[0]
        raise ConfigError(f"no tokenizer can be loaded from the checkpoint {path!r}: {reason}") from error
    return tokenizer, load_processor(path)


@dataclass(eq=False)
class _Opened:
    """A runtime that is being built or in use."""

    args: Any
    loop: asyncio.AbstractEventLoop
    building: asyncio.Task[Runtime]

    @property
    def failed(self) -> bool:
        return self.building.done() and (self.building.cancelled() or self.building.exception() is not None)


_opened: list[_Opened] = []


async def get_runtime(args: Any) -> Runtime:
    """The runtime of this `args` on the running event loop; the first call builds it in a thread.

    Raises:
        ConfigError, EncodingError: as `build_runtime`; a later call tries again.
    """
    loop = asyncio.get_running_loop()
    found = next((opened for opened in _opened if opened.args is args and opened.loop is loop), None)
    if found is not None and found.failed:
        _opened.remove(found)
        found = None
    if found is None:
        found = _Opened(args, loop, asyncio.create_task(asyncio.to_thread(_build_and_freeze, args)))
        _opened.append(found)
    return await found.building


def open_runtimes() -> list[Runtime]:
    """The runtimes of this process, on any event loop."""
    return [opened.building.result() for opened in list(_opened) if opened.building.done() and not opened.failed]


def _build_and_freeze(args: Any) -> Runtime:
    """Build the runtime, then exempt the objects made so far from garbage collection.

    Otherwise every full collection would walk all objects of torch and transformers.
    """
    runtime = build_runtime(args)
    gc.collect()
    gc.freeze()
    return runtime


@asynccontextmanager
async def full_gc_deferred() -> AsyncIterator[None]:
    """Defer Python's full garbage collections and run one on exit; young objects are collected as usual.

    A full collection walks every live object, including the live episodes and the batch so far. It takes some hundred
    milliseconds, in which no request is sent and no answer is read.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        await asyncio.to_thread(gc.collect)


async def close_runtimes() -> None:
    """Close every runtime of the running event loop; the next `get_runtime` makes a new one."""
    loop = asyncio.get_running_loop()
    for opened in [opened for opened in _opened if opened.loop is loop]:
        _opened.remove(opened)
        await asyncio.wait([opened.building])  # an interrupted run may close while the runtime is being built
        if not opened.failed:
            await opened.building.result().close()
