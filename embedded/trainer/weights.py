"""Convert weights of Qwen2-, Qwen3- and Llama-shaped models between Hugging Face's and Megatron-core's names.

Megatron fuses the queries, keys and values of each group into one matrix, and gate and up projection into another.
"""

from collections.abc import Mapping
from typing import Any

import torch

_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",  # Qwen3 alone has these two
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_OPTIONAL = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def head_dim(config: Any) -> int:
    """Read the width of one attention head from a Hugging Face model config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def query_groups(config: Any) -> int:
    """Read the number of key and value heads from a Hugging Face model config."""
    return config.num_key_value_heads or config.num_attention_heads


def hf_to_megatron(state: Mapping[str, torch.Tensor], config: Any, *, head: bool = True) -> dict[str, torch.Tensor]:
    """Rename and fuse the weights of a model with this Hugging Face config.

    Without `head`, the output layer is left out. The result shares no memory with `state`.
    """
    out = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"].clone(),
        "decoder.final_layernorm.weight": state["model.norm.weight"].clone(),
    }
    if head and "lm_head.weight" in state:
        out["output_layer.weight"] = state["lm_head.weight"].clone()
    for i in range(config.num_hidden_layers):
        source, target = f"model.layers.{i}.", f"decoder.layers.{i}."
        names = ((new, old) for new, old in _NAMES.items() if old not in _OPTIONAL or source + old in state)
        out |= {target + new: state[source + old].clone() for new, old in names}
        for kind in ("weight", "bias"):
            if f"{source}self_attn.q_proj.{kind}" in state:
                parts = [state[f"{source}self_attn.{x}_proj.{kind}"] for x in "qkv"]
                grouped = [p.view(query_groups(config), -1, head_dim(config), *p.shape[1:]) for p in parts]
                fused = torch.cat(grouped, 1)
                out[f"{target}self_attention.linear_qkv.{kind}"] = fused.reshape(-1, *parts[0].shape[1:])
        gate_up = [state[f"{source}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        out[target + "mlp.linear_fc1.weight"] = torch.cat(gate_up)
    return out


def megatron_to_hf(state: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Invert `hf_to_megatron`, without a critic's head and without Megatron's extra states."""
    out = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
    }
    head = state.get("output_layer.weight")
    if head is not None and head.shape == out["model.embed_tokens.weight"].shape:
        out["lm_head.weight"] = head
    for i in range(config.num_hidden_layers):
        source, target = f"decoder.layers.{i}.", f"model.layers.{i}."
        out |= {target + new: state[source + old] for old, new in _NAMES.items() if source + old in state}
        for kind in ("weight", "bias"):
            fused = state.get(f"{source}self_attention.linear_qkv.{kind}")
            if fused is not None:
                grouped = fused.view(query_groups(config), -1, head_dim(config), *fused.shape[1:])
                for x, part in zip("qkv", (grouped[:, :-2], grouped[:, -2], grouped[:, -1]), strict=True):
                    out[f"{target}self_attn.{x}_proj.{kind}"] = part.reshape(-1, *fused.shape[1:])
        gate, up = state[source + "mlp.linear_fc1.weight"].chunk(2)
        out[target + "mlp.gate_proj.weight"], out[target + "mlp.up_proj.weight"] = gate, up
    return {name: tensor.detach() for name, tensor in out.items()}
