"""What training replays of the rollout beside tokens: routed experts of MoE models, and top-p's kept tokens.

Samples that nothing was generated for carry stand-ins, because slime wants these of every sample or of none; they
are masked, so which experts they name has no effect on the loss.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from rollout.bridge.framework import Sample


def keep_routing(sample: Sample, meta_info: Mapping[str, Any], args: Any) -> None:
    """Keep the engine's routed experts of all tokens so far, as slime v0.3.0 and miles do: [tokens - 1, layers, k]."""
    encoded = meta_info.get("routed_experts")
    if encoded is None:
        return
    flat = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.int32)
    shape = (len(sample.tokens) - 1, args.num_layers, args.moe_router_topk)
    sample.rollout_routed_experts = flat.reshape(shape).numpy()


def fill_top_p(sample: Sample, args: Any) -> None:
    """An empty record of the kept tokens for a response that has none, where `args` asks for top-p replay."""
    if getattr(sample, "rollout_top_p_token_offsets", None) is None:
        _empty_top_p(sample, args)


def _empty_top_p(sample: Sample, args: Any) -> None:
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        sample.rollout_top_p_token_ids = []
        sample.rollout_top_p_token_offsets = [0] * (sample.response_length + 1)


def fill_replay(sample: Sample, args: Any) -> None:
    """Stand-ins for a sample without a generation of its own, where `args` asks for replay."""
    _empty_top_p(sample, args)
    if getattr(args, "use_rollout_routing_replay", False):
        experts = torch.arange(args.moe_router_topk, dtype=torch.int32)
        sample.rollout_routed_experts = experts.expand(len(sample.tokens) - 1, args.num_layers, -1).numpy().copy()
