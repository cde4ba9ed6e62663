"""A tiny Qwen2-shaped policy with random weights, as a Hugging Face folder; imitation trains it first."""

from pathlib import Path
from typing import Any, Self

import torch
from pydantic import model_validator

from slime_verlog import ConfigError, Field, Settings


class PolicySize(Settings):
    """Shape of the transformer; the default has about half a million parameters."""

    layers: int = Field(default=3, ge=1)
    """Transformer blocks."""
    hidden: int = Field(default=128, ge=1)
    """Width of the residual stream."""
    heads: int = Field(default=4, ge=1)
    """Query heads; a divisor of `hidden`."""
    kv_heads: int = Field(default=4, ge=1)
    """Key and value heads; a divisor of `heads`."""
    ffn: int = Field(default=256, ge=1)
    """Width inside the MLP."""
    context: int = Field(default=1024, ge=1)
    """Positions: the longest prompt plus answer, in tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            heads = f"heads {self.heads} must divide hidden {self.hidden}"
            raise ConfigError(f"size: {heads}, and kv_heads {self.kv_heads} must divide heads")
        return self


def build_policy(tokenizer: Any, size: PolicySize | None = None, seed: int = 0) -> Any:
    """Build a randomly initialized Qwen2 model for the tokenizer's vocabulary."""
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    size = size or PolicySize()
    config = Qwen2Config(
        # Rounded up to a multiple of 32, which matrix kernels prefer.
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
