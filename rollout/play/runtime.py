"""The parts that all rollouts of one process share: settings, flags, encoder, engine client, environment pool."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rollout.bridge import tracing
from rollout.bridge.checks import installs_advantages
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import FRAMEWORK
from rollout.bridge.sample import SampleWriter
from rollout.bridge.settings import RolloutSettings, load_settings
from rollout.errors import ConfigError
from rollout.play.engine import EngineClient
from rollout.play.memory import Memory, build_memory
from rollout.play.parked import ParkedEpisodes
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import Prompt
from rollout.workers.pool import EnvPool

Tools = Sequence[Mapping[str, Any]]
MOST_TOOL_SETS = 256


class Closable(Protocol):
    """Something that plays in the background until it is closed."""

    async def close(self) -> None: ...


@dataclass
class Runtime:
    """The parts that a turn needs; `get_runtime` makes one per `args` and event loop."""

    settings: RolloutSettings
    flags: RolloutFlags
    samples: SampleWriter
    encoder: DeltaEncoder
    engine: EngineClient
    pool: EnvPool
    memory: Memory
    make_encoder: Callable[..., DeltaEncoder]
    """`encoder` with other `tools`."""
    traced: bool = False
    """Whether turns record where their time goes."""
    counters: Counter[str] = field(default_factory=Counter)
    parked: ParkedEpisodes = field(default_factory=ParkedEpisodes)
    """Aborted episodes of slime's outer loop; empty under the fixed-turn rollout."""
    logged: Counter[str] = field(default_factory=Counter)
    """`fault_counts()` when the log hook last read them."""
    stream: Closable | None = None
    """The stream of continuous batches; None under other rollouts."""
    _with_tools: dict[str, DeltaEncoder] = field(default_factory=dict)
    _tools_lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_counts(self) -> Counter[str]:
        """All faults and retries so far, by name."""
        found = Counter(self.counters)
        found.update({f"env_{kind}": count for kind, count in self.pool.faults.items()})
        found.update({f"engine_{kind}": count for kind, count in self.engine.faults.items()})
        return found

    def encoder_for(self, tools: Tools) -> DeltaEncoder:
        """The encoder whose prompts show these tools; `encoder` if there are no tools.

        Raises:
            EncodingError: the chat template ignores tools or their results.
        """
        if not tools:
            return self.encoder
        key = json.dumps(list(tools), sort_keys=True)
        with self._tools_lock:  # prompts of agents are built in threads
            if (encoder := self._with_tools.pop(key, None)) is not None:
                self._with_tools[key] = encoder  # now the last to be dropped
                return encoder
        encoder = self.make_encoder(tools=tools)
        with self._tools_lock:
            self._with_tools[key] = encoder
            if len(self._with_tools) > MOST_TOOL_SETS:
                self._with_tools.pop(next(iter(self._with_tools)))
        return encoder

    def fits(self, prompt: Prompt) -> bool:
        """Whether the prompt leaves room in the context for an answer of full length."""
        return self.flags.fits(len(prompt.token_ids))

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
        traced=tracing.is_on(args),
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


_runtimes: dict[tuple[int, int], tuple[Any, asyncio.Task[Runtime]]] = {}
"""By the ids of `args` and of the event loop; the entry holds `args`, so that its id is not used again."""


async def get_runtime(args: Any) -> Runtime:
    """The runtime of this `args` on the running event loop; the first call builds it in a thread.

    Raises:
        ConfigError, EncodingError: as `build_runtime`; a later call tries again.
    """
    key = (id(args), id(asyncio.get_running_loop()))
    _, task = _runtimes.get(key, (args, None))
    if task is None or (task.done() and task.exception()):
        task = asyncio.create_task(asyncio.to_thread(_build_and_freeze, args))
        _runtimes[key] = args, task
    return await task


def open_runtimes() -> list[Runtime]:
    """The runtimes of this process, on any event loop."""
    done = [task for _, task in list(_runtimes.values()) if task.done() and not task.cancelled()]
    return [task.result() for task in done if task.exception() is None]


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
    loop = id(asyncio.get_running_loop())
    for key in [key for key in _runtimes if key[1] == loop]:
        _, task = _runtimes.pop(key)
        await asyncio.wait([task])  # an interrupted run may close while the runtime is being built
        if not task.cancelled() and not task.exception():
            await task.result().close()
