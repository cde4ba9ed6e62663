"""A tiny Qwen2-shaped policy as a Hugging Face folder: random weights, to be warm-started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class PolicySize:
    """Shape of the transformer; the default has about half a million parameters."""

    layers: int = 3
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 256
    context: int = 1024


def build_policy(tokenizer: Any, size: PolicySize | None = None, seed: int = 0) -> Any:
    """A randomly initialised Qwen2 model for the tokenizer's vocabulary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = size or PolicySize()
    config = Qwen2Config(
        # Rounded up, so that matrix kernels see an even width.
        vocab_size=-(-len(tokenizer) // 32) * 32,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.context,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float()


def save_policy(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Write model (safetensors) and tokenizer as one Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
