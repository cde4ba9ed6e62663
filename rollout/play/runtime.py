"""What one run owns in this process: the parts that its episodes share, parked episodes, and the stream."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from envs.plain_text import PlainText
from rollout.bridge.checks import installs_advantages, process_count
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import HAS_SLIME, Sample
from rollout.bridge.sample import SampleWriter, is_traced
from rollout.bridge.settings import EngineSettings, RolloutSettings, load_settings
from rollout.errors import ConfigError
from rollout.play.clock import Demands
from rollout.play.engine import EngineClient, EngineLoads
from rollout.play.memory import Memory, build_memory
from rollout.play.metrics import count_retries
from rollout.spec import EpisodeSpec, Replay
from rollout.tokens.chat_template import ChatTemplate
from rollout.tokens.encoding import DeltaEncoder, choose_template
from rollout.tokens.profile import Profile, learn_profile
from rollout.turn import Turn
from rollout.workers.pool import EnvPool
from rollout.workers.utilization import ProcessUsage

if TYPE_CHECKING:
    from rollout.play.episode import Episode
    from rollout.play.stream import Stream  # loaded by `rollout.continuous` alone

logger = logging.getLogger(__name__)

MIN_CONNECTIONS = 1024
"""Connections to the engine that a process may open, or one per slot if there are more."""
MAX_TOOL_SETS = 256
"""Encoders with tools that are kept."""


@dataclass(frozen=True)
class Parked:
    """A live episode, its turns so far, and the sample that it plays for."""

    sample: Sample
    episode: Episode
    turns: list[Turn]


@dataclass
class ParkedEpisodes:
    """Parked episodes, oldest first, by their samples' identity, since indices repeat in an evaluation."""

    dropped: int = 0
    """Episodes closed for lack of room; each starts from the beginning when its sample is handed out again."""
    _parked: dict[int, Parked] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._parked)

    def take(self, sample: Sample) -> Parked | None:
        """Remove and return the sample's episode; None if it is not parked."""
        return self._parked.pop(id(sample), None)

    async def park(self, parked: Parked, most: int) -> None:
        """Park the episode; close the oldest ones if there are more than `most`."""
        self._parked[id(parked.sample)] = parked
        while len(self._parked) > most:
            oldest = self._parked.pop(next(iter(self._parked)))
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("more than %d aborted episodes wait to continue; the oldest ones are closed", most)
            await oldest.episode.close()

    async def close(self) -> None:
        """Close all of them."""
        while self._parked:
            await self._parked.popitem()[1].episode.close()


class Players(Protocol):
    """Processes that play episodes for this one (`rollout/players/manager.py`)."""

    faults: Counter[str]
    demands: Demands

    async def open(self, spec: EpisodeSpec, replay: Replay | None = None) -> Episode: ...
    async def evaluate(self, spec: EpisodeSpec) -> Any: ...
    def usage(self) -> list[ProcessUsage]: ...
    async def refresh(self) -> None: ...
    async def close(self) -> None: ...


@dataclass
class Runtime:
    """What one run owns in this process; `get_runtime` makes one per `args` and event loop."""

    settings: RolloutSettings
    flags: RolloutFlags
    encoder: DeltaEncoder
    engine: EngineClient
    engine_loads: EngineLoads
    pool: EnvPool
    memory: Memory
    samples: SampleWriter
    make_encoder: Callable[..., DeltaEncoder]
    """Makes an encoder like `encoder` whose prompts show the given `tools`."""
    warned: set[str] = field(default_factory=set)
    """What was warned about and is not warned about again."""
    traced: bool = False
    """Whether turns record where their time goes."""
    counters: Counter[str] = field(default_factory=Counter)
    parked: ParkedEpisodes = field(default_factory=ParkedEpisodes)
    """Aborted episodes of slime's outer loop; empty under the fixed-turn rollout."""
    _reported: Counter[str] = field(default_factory=Counter)
    """`fault_counts()` at the last `new_faults()`."""
    stream: Stream | None = None
    """The stream of continuous batches; None under other rollouts."""
    players: Players | None = None
    """The processes that play; None: this process does (`rollout_processes: 1`)."""
    _with_tools: dict[str, DeltaEncoder] = field(default_factory=dict)
    _tools_lock: threading.Lock = field(default_factory=threading.Lock)

    def trainable(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """Return the turns; those that the actor's weights did not write lose their loss and are counted.

        Such a turn was played before any engine had named its weights.
        """
        found = [turn if self.engine.weights.wrote(turn.generation) else turn.without_loss() for turn in turns]
        if changed := sum(new is not old for new, old in zip(found, turns, strict=True)):
            self.counters["turns_by_other_weights"] += changed
        return tuple(found)

    def fault_counts(self) -> Counter[str]:
        """All faults and retries so far, by name."""
        found = self._own_faults()
        return found if self.players is None else found + self.players.faults

    def new_faults(self) -> Counter[str]:
        """Faults and retries since the last call, also those between batches, by name."""
        now = self.fault_counts()
        found, self._reported = now - self._reported, now
        return found

    def _own_faults(self) -> Counter[str]:
        found = Counter(self.counters)
        found.update({f"env_{kind}": count for kind, count in self.pool.faults.items()})
        found.update({f"engine_{kind}": count for kind, count in self.engine.faults.items()})
        return found

    def usage(self) -> list[ProcessUsage]:
        """What this process and the players have used so far; called on the event loop."""
        engine, env = self.engine.utilization.snapshot(), self.pool.utilization.snapshot()
        own = ProcessUsage(engine, env, time.thread_time(), count_retries(self._own_faults()))
        return [own, *(self.players.usage() if self.players is not None else ())]

    def encoder_for(self, tools: Sequence[Mapping[str, Any]]) -> DeltaEncoder:
        """Return the encoder whose prompts show these tools; raises EncodingError if the template ignores them."""
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
            if len(self._with_tools) > MAX_TOOL_SETS:
                self._with_tools.pop(next(iter(self._with_tools)))
        return encoder

    async def close(self) -> None:
        """Close the stream, the parked episodes, the players, the workers and the connections."""
        if self.stream is not None:
            await self.stream.close()
        await self.parked.close()
        if self.players is not None:
            await self.players.close()
        self.pool.close()
        self.engine_loads.close()
        await self.engine.close()


def build_runtime(args: Any) -> Runtime:
    """Make the parts from slime's `args`.

    Raises:
        ConfigError: a setting or flag is invalid.
        EncodingError: the tokenizer's chat template does not support the configured `history`.
    """
    settings, flags = load_settings(args), RolloutFlags.read(args)
    small = HAS_SLIME and installs_advantages(args)
    make_encoder = encoders_of(flags.hf_checkpoint, settings, small_images=small)
    encoder, url = make_encoder(), f"http://{flags.sglang_router_ip}:{flags.sglang_router_port}"
    from rollout.tokens.rehearsal import rehearse

    for sentence in rehearse(encoder, settings.history):
        logger.warning("%s: %s", flags.hf_checkpoint, sentence)
    connections = max(MIN_CONNECTIONS, settings.n_env)
    # The first push of slime's delta mode sends nothing, so the engine still has its own name for its weights.
    names = {"default": "0"} if flags.update_weight_mode == "delta" else {}
    patient = _patient(settings.engine, args)
    engine = EngineClient(url, patient, max_connections=connections, version_names=names)
    return Runtime(
        settings=settings,
        flags=flags,
        samples=SampleWriter(args, dummy_token=min(encoder.end_of_turn_ids)),
        encoder=encoder,
        make_encoder=make_encoder,
        engine=engine,
        engine_loads=EngineLoads(url, engine.get),
        pool=EnvPool(settings, encoder.profile.call_form),
        memory=build_memory(settings.memory),
        traced=is_traced(args),
    )


def _patient(engine: EngineSettings, args: Any) -> EngineSettings:
    """With `--use-fault-tolerance`, retry longer than slime may take to find a dead engine, unless the YAML says."""
    if not getattr(args, "use_fault_tolerance", False) or "max_retries" in engine.model_fields_set:
        return engine
    waits = (getattr(args, f"rollout_health_check_{name}") for name in ("first_wait", "interval", "timeout"))
    more = math.ceil(2 * sum(waits) / engine.backoff_max_s)  # these pauses are at least half of backoff_max_s
    return engine.model_copy(update={"max_retries": engine.max_retries + more})


def encoders_of(
    checkpoint: str, settings: RolloutSettings, *, small_images: bool = False
) -> Callable[..., DeltaEncoder]:
    """Return a function from `tools` to the checkpoint's encoder; raises ConfigError without a tokenizer.

    With `small_images`, training inputs hold PNG bytes, which `advantage.patch` expands on the training ranks.
    """
    tokenizer, processor = _load_tokenizer_and_processor(checkpoint)
    return partial(
        DeltaEncoder,
        tokenizer,
        processor,
        profile=profile_of(checkpoint, tokenizer, processor, settings),
        chat_template_kwargs=dict(settings.chat_template_kwargs),
        sanity_check=settings.tokenization_sanity_check,
        use_inference_chat_template=settings.use_inference_chat_template,
        history=settings.history,
        max_image_pixels=settings.max_image_pixels,
        small_images=small_images,
    )


def profile_of(checkpoint: str, tokenizer: Any, processor: Any, settings: RolloutSettings) -> Profile:
    """Probe the checkpoint's chat template and read its stop ids; raises EncodingError if it cannot be used."""
    from rollout.tokens.images import read_json

    source = choose_template(tokenizer, processor, tools=False)
    text = PlainText(tokenizer, source)
    template = ChatTemplate(tokenizer, source, None, settings.chat_template_kwargs, text.pattern)
    return learn_profile(tokenizer, template, text, read_json(checkpoint, "generation_config.json") or {})


def _load_tokenizer_and_processor(path: str) -> tuple[Any, Any]:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    from rollout.tokens.images import load_processor

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
    """Return this `args`' runtime on the running event loop; builds it in a thread; raises as `build_runtime`."""
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
    """Build the runtime and its players, and exempt torch's and transformers' objects from garbage collection."""
    runtime = build_runtime(args)
    if (count := process_count(args, runtime.settings)) > 1:
        from rollout.players.manager import PlayerProcesses

        runtime.players = PlayerProcesses(runtime, args, count)
    gc.collect()
    gc.freeze()
    return runtime


@asynccontextmanager
async def full_gc_deferred() -> AsyncIterator[None]:
    """Defer Python's full garbage collections, each of some hundred milliseconds, and run one on exit."""
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
