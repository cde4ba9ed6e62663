"""What an episode adds to a request to the engine, and whether the engine used the prompt that it
was sent."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from rollout.bridge.flags import RolloutFlags
from rollout.spec import EpisodeSpec
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import Generation, Prompt

NOT_COUNTED = (0, 1)
"""What engines report that do not count the tokens of prompts; no prompt is that short."""


def complete_params(
    params: Mapping[str, Any],
    encoder: DeltaEncoder,
    flags: RolloutFlags,
    spec: EpisodeSpec,
    turn: int,
) -> dict[str, Any]:
    """Add to the sampling parameters what every request of this turn needs."""
    # An engine may know fewer tokens that end a turn than the template writes.
    stops = dict.fromkeys((*(params.get("stop_token_ids") or ()), *encoder.end_of_turn_ids))
    complete = {**params, "stop_token_ids": list(stops)}
    if flags.sglang_enable_deterministic_inference:
        complete["sampling_seed"] = sampling_seed(
            params.get("sampling_seed", flags.rollout_seed), spec, turn
        )
    if encoder.placeholder_ids:
        # An image placeholder in a response would refer to an image that does not exist.
        complete["logit_bias"] = {str(token): -100.0 for token in encoder.placeholder_ids}
    return complete


def sampling_seed(base: int, spec: EpisodeSpec, turn: int) -> int:
    """The seed of one turn: with the same seed, every turn would draw the same numbers."""
    # The environment's seed tells held-out episodes from those of training with the same id.
    name = f"{base}/{spec.env.metadata.get('seed')}/{spec.episode_id}/{turn}"
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest()) % 2**31


def routing_headers(flags: RolloutFlags, spec: EpisodeSpec) -> Mapping[str, str] | None:
    """Headers that keep the episode on the engine with its cached prefix; None unless the router
    reads them."""
    return (
        {"X-SMG-Routing-Key": spec.routing_key}
        if flags.router_policy == "consistent_hashing"
        else None
    )


def differing_prompt(generation: Generation, prompt: Prompt) -> tuple[str, str] | None:
    """Return the name of the fault, and words for it, if the engine answered a prompt of another
    length."""
    used = generation.meta_info.get("prompt_tokens")
    sent = len(prompt.token_ids)
    if not isinstance(used, int) or used in (sent, *NOT_COUNTED):
        return None
    name = "image_prompt_tokens_differ" if prompt.image_data else "prompt_tokens_differ"
    words = f"the engine used {used} prompt tokens, but {sent} are trained; it cut the prompt or encoded it again"
    return name, words
