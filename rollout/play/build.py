"""Makes the parts that the episodes of one run share, from slime's flags and the YAML."""

import json
import logging
import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from envs.plain_text import PlainText
from rollout.bridge.checks import installs_advantages
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import HAS_SLIME
from rollout.bridge.sample import SampleWriter
from rollout.bridge.settings import EngineSettings, RolloutSettings, load_settings
from rollout.bridge.trace import is_traced
from rollout.errors import ConfigError
from rollout.play.engine import EngineClient
from rollout.play.engine_loads import EngineLoads
from rollout.play.memory import memory_of
from rollout.play.parts import Runtime
from rollout.tokens.chat_template import ChatTemplate
from rollout.tokens.encoding import DeltaEncoder, choose_template
from rollout.tokens.images import load_processor, read_json
from rollout.tokens.profile import Profile, learn_profile
from rollout.tokens.rehearsal import rehearse
from rollout.workers.pool import EnvPool

logger = logging.getLogger(__name__)

MAX_TOOL_SETS = 256
"""Encoders with tools that are kept."""
MIN_CONNECTIONS = 1024
"""Connections to the engine that a process may open, or one per slot if there are more."""


def build_runtime(args: Any) -> Runtime:
    """Make the parts from slime's `args`.

    Raises:
        ConfigError: a setting or flag is invalid.
        EncodingError: the tokenizer's chat template does not support the configured `history`.
    """
    settings = load_settings(args)
    flags = RolloutFlags.read(args)
    small = HAS_SLIME and installs_advantages(args)
    make_encoder = encoders_of(flags.hf_checkpoint, settings, small_images=small)
    encoder = make_encoder()
    url = f"http://{flags.sglang_router_ip}:{flags.sglang_router_port}"
    for sentence in rehearse(encoder, settings.history):
        logger.warning("%s: %s", flags.hf_checkpoint, sentence)
    connections = max(MIN_CONNECTIONS, settings.n_env)
    # The first push of slime's delta mode sends nothing, so the engine still has its own name for
    # its weights.
    names = {"default": "0"} if flags.update_weight_mode == "delta" else {}
    patient = _patient(settings.engine, flags)
    engine = EngineClient(url, patient, max_connections=connections, version_names=names)
    return Runtime(
        settings=settings,
        flags=flags,
        samples=SampleWriter(
            args, dummy_token=min(encoder.end_of_turn_ids), chains=settings.samples == "chains"
        ),
        encoder=encoder,
        with_tools=lru_cache(MAX_TOOL_SETS)(lambda tools: make_encoder(tools=json.loads(tools))),
        engine=engine,
        engine_loads=EngineLoads(url, engine.get),
        pool=EnvPool(settings, encoder.profile.call_form),
        memory=memory_of(settings),
        traced=is_traced(args),
    )


def _patient(engine: EngineSettings, flags: RolloutFlags) -> EngineSettings:
    """With `--use-fault-tolerance`, retry longer than slime may take to find a dead engine, unless
    the YAML says."""
    if not flags.use_fault_tolerance or "max_retries" in engine.model_fields_set:
        return engine
    dead_s = flags.rollout_health_check_first_wait + flags.rollout_health_check_interval
    dead_s += flags.rollout_health_check_timeout
    # These pauses are at least half of backoff_max_s.
    more = math.ceil(2 * dead_s / engine.backoff_max_s)
    return engine.model_copy(update={"max_retries": engine.max_retries + more})


def encoders_of(
    checkpoint: str, settings: RolloutSettings, *, small_images: bool = False
) -> Callable[..., DeltaEncoder]:
    """Return a function from `tools` to the checkpoint's encoder; raises ConfigError without a
    tokenizer.

    With `small_images`, training inputs hold PNG bytes, which `advantage.patch` expands on the
    training ranks.
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


def profile_of(
    checkpoint: str, tokenizer: Any, processor: Any, settings: RolloutSettings
) -> Profile:
    """Probe the checkpoint's chat template and read its stop ids; raises EncodingError if it cannot
    be used."""
    source = choose_template(tokenizer, processor, tools=False)
    text = PlainText(tokenizer, source)
    template = ChatTemplate(tokenizer, source, None, settings.chat_template_kwargs, text.pattern)
    return learn_profile(
        tokenizer, template, text, read_json(checkpoint, "generation_config.json") or {}
    )


def _load_tokenizer_and_processor(path: str) -> tuple[Any, Any]:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    except (OSError, ValueError) as error:
        is_gone = path.startswith(("/", ".", "~")) and not Path(path).exists()
        reason = "the folder does not exist" if is_gone else str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no tokenizer can be loaded from the checkpoint {path!r}: {reason}"
        ) from error
    return tokenizer, load_processor(path)
