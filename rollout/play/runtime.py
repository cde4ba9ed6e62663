"""What all rollouts of one process share: checked config, encoder, engine client, environment pool."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollout.bridge.settings import RolloutConfig, load_config
from rollout.engine import EngineClient
from rollout.play.memory import Memory, build_memory
from rollout.play.parked import ParkedEpisodes
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import Prompt
from rollout.workers.pool import EnvPool

Tools = Sequence[Mapping[str, Any]]
MOST_TOOL_SETS = 256


@dataclass
class Runtime:
    """The parts that a turn needs; one a process and event loop, made by `get_runtime`."""

    args: Any
    config: RolloutConfig
    encoder: DeltaEncoder
    engine: EngineClient
    pool: EnvPool
    memory: Memory
    make_encoder: Callable[[Tools], DeltaEncoder]
    counters: Counter[str] = field(default_factory=Counter)
    parked: ParkedEpisodes = field(default_factory=ParkedEpisodes)
    """Aborted episodes of slime's outer loop; empty under the fixed-turn rollout."""
    logged: Counter[str] = field(default_factory=Counter)
    """All counts of faults when the log hook last read them."""
    _with_tools: dict[str, DeltaEncoder] = field(default_factory=dict)

    @property
    def dummy_token(self) -> int:
        """The token that stands for "nothing was generated" in a bootstrap sample; its value is never read."""
        return min(self.encoder.end_of_turn_ids)

    def encoder_for(self, tools: Tools) -> DeltaEncoder:
        """The encoder whose prompts show these tools; `encoder` itself where there are none.

        Raises:
            EncodingError: the chat template ignores tools or their results.
        """
        if not tools:
            return self.encoder
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._with_tools:
            if len(self._with_tools) >= MOST_TOOL_SETS:
                self._with_tools.pop(next(iter(self._with_tools)))
            self._with_tools[key] = self.make_encoder(tools)
        return self._with_tools[key]

    def fits(self, prompt: Prompt) -> bool:
        """Whether the prompt leaves room for a whole answer; an answer is never cut short by the context."""
        length = len(prompt.token_ids)
        context = getattr(self.args, "rollout_max_context_len", None)
        longest = getattr(self.args, "rollout_max_prompt_len", None)
        if longest is not None and length > longest:
            return False
        return context is None or length + self.args.rollout_max_response_len <= context

    async def close(self) -> None:
        """End the parked episodes, the workers and the connections."""
        await self.parked.close()
        self.pool.close()
        await self.engine.close()


def build_runtime(args: Any, config: RolloutConfig | None = None) -> Runtime:
    """Make the parts from slime's `args`.

    Raises:
        ConfigError: the YAML or the flags cannot work together.
        EncodingError: the tokenizer's template cannot do what `history` promises.
    """
    config = config or load_config(args)
    tokenizer, processor = load_tokenizer_and_processor(args.hf_checkpoint)

    def make_encoder(tools: Tools) -> DeltaEncoder:
        return DeltaEncoder(
            tokenizer,
            processor,
            tools=tools or None,
            chat_template_kwargs=dict(config.chat_template_kwargs),
            sanity_check=config.tokenization_sanity_check,
            use_inference_chat_template=config.use_inference_chat_template,
            history=config.history,
            max_image_pixels=config.max_image_pixels,
        )

    return Runtime(
        args=args,
        config=config,
        encoder=make_encoder(()),
        make_encoder=make_encoder,
        engine=EngineClient(engine_url(args), config.engine),
        pool=EnvPool(config),
        memory=build_memory(config.memory),
    )


def engine_url(args: Any) -> str:
    """The router in front of the engines, as slime names it."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def load_tokenizer_and_processor(path: str) -> tuple[Any, Any]:
    """The checkpoint's tokenizer, and its image processor if it has one."""
    from transformers import AutoTokenizer

    from rollout.tokens.encoding import load_processor

    return AutoTokenizer.from_pretrained(path, trust_remote_code=True), load_processor(path)


def sampling_params(args: Any, *, evaluation: bool = False) -> dict[str, Any]:
    """SGLang's sampling parameters from slime's flags, as slime's own rollout sets them."""

    def flag(name: str, default: Any = None) -> Any:
        value = getattr(args, f"eval_{name}", None) if evaluation else None
        return value if value is not None else getattr(args, f"rollout_{name}", default)

    params = {
        "temperature": flag("temperature", 1.0),
        "top_p": flag("top_p", 1.0),
        "top_k": flag("top_k", -1),
        "max_new_tokens": flag("max_response_len"),
        "stop": getattr(args, "rollout_stop", None),
        "stop_token_ids": getattr(args, "rollout_stop_token_ids", None),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if not evaluation and params["top_p"] != 1.0:
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


_runtimes: dict[tuple[int, int], asyncio.Task[Runtime]] = {}


async def get_runtime(args: Any) -> Runtime:
    """The runtime of this `args` on the running event loop, made at the first call, off the loop.

    Raises:
        ConfigError, EncodingError: as `build_runtime`; a later call tries again.
    """
    key = (id(args), id(asyncio.get_running_loop()))
    task = _runtimes.get(key)
    if task is None or (task.done() and (task.exception() or task.result().args is not args)):
        task = _runtimes[key] = asyncio.create_task(asyncio.to_thread(_build_and_freeze, args))
    return await task


def open_runtimes() -> list[Runtime]:
    """The runtimes of this process, whichever event loop they run on."""
    done = [task for task in list(_runtimes.values()) if task.done() and not task.cancelled()]
    return [task.result() for task in done if task.exception() is None]


def _build_and_freeze(args: Any) -> Runtime:
    """Build the runtime, then take what start-up left on the heap out of the garbage collector's reach.

    A full collection walks every object of torch and transformers, on whichever callback it falls.
    """
    runtime = build_runtime(args)
    gc.collect()
    gc.freeze()
    return runtime


@asynccontextmanager
async def full_collections_afterwards() -> AsyncIterator[None]:
    """Put off Python's full garbage collections to the end of this block, where one is made.

    A full collection walks everything that is alive, live episodes and the batch so far included: some hundred
    milliseconds in which no request is sent and no answer read. Young garbage is collected as ever.
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
        task = _runtimes.pop(key)
        if not task.exception():
            await task.result().close()
