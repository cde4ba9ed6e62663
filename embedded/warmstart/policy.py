"""A tiny Qwen2-shaped policy with random weights, as a Hugging Face folder, and its tokenizer;
imitation trains it.

The tokenizer is a ChatML one, trained on a game's own text. It is byte-level, so it can encode any
text. Each phrase that all prompts of a game repeat becomes one token, which keeps prompts short
enough for a CPU.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import model_validator
from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from slime_verlog import ConfigError, Field, Settings

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ANSWER_PHRASES = ("Previous plan:\n", "THINK:", "\nACTION:")
ROLES = tuple(f"{role}\n" for role in ("system", "user", "assistant"))
"""Each role and the line break after it is one token."""
NUMBERS = tuple(f" {digit}" for digit in range(10))
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
CHAT_TEMPLATE = """\
{%- macro calls(message) -%}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor -%}
{%- endmacro -%}
{%- if tools -%}
{%- set said = messages[0].content + '\\n\\n' if messages and messages[0].role == 'system' else '' -%}
{{- '<|im_start|>system\\n' + said + 'Tools:\\n' -}}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + calls(message) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


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


def find_model(name: str) -> Path:
    """Find the folder `name`, or download the hub's model of that name; raises ConfigError if
    neither works."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        failed = f"--model '{name}' is not a folder and could not be downloaded from the hub: {lines[0].rstrip('.')}"
        raise ConfigError(f"{failed}; give the folder of a Hugging Face model") from error


def build_policy(tokenizer: Any, size: PolicySize, seed: int = 0) -> Any:
    """Build a randomly initialized Qwen2 model for the tokenizer's vocabulary."""
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

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


def train_tokenizer(
    texts: Iterable[str], phrases: Sequence[str] = (), vocab_size: int = 512
) -> Qwen2Tokenizer:
    """Train byte-level BPE on `texts`; each of `phrases` becomes one token wherever it occurs.

    `vocab_size` counts the 256 bytes and the merges; phrases and control tokens come on top. The
    class is Qwen2's own, because AutoTokenizer loads that class for every Qwen2-shaped model,
    whatever the tokenizer file says.
    """
    core = Qwen2Tokenizer().backend_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    plain = list(dict.fromkeys((*ANSWER_PHRASES, *ROLES, *NUMBERS, *phrases)))
    # Merges are trained on the rest of the text. Longer phrases are cut out first.
    longest_first = sorted(plain, key=len, reverse=True)
    fixed = re.compile("|".join(map(re.escape, longest_first)))
    varying = [part for text in texts for part in fixed.split(text)]
    core.train_from_iterator([*["system", "user", "assistant", "tool"] * 8, *varying], trainer)
    model = json.loads(core.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    plain_tokens = [token for token in learned if token not in CONTROL_TOKENS]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(plain_tokens)},
        merges=[tuple(merge) for merge in model["merges"]],  # type: ignore[arg-type]
        unk_token=None,  # type: ignore[arg-type]
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    added: list[Any] = [AddedToken(phrase, normalized=False) for phrase in plain]
    tokenizer.add_tokens(added)
    return tokenizer


def common_ends(texts: Sequence[str]) -> tuple[str, str]:
    """Find the longest common start and the longest common end of `texts`, cut at word
    boundaries."""
    if not texts:
        return "", ""
    prefix = _common_prefix(texts)
    if any(len(text) > len(prefix) for text in texts):
        prefix = prefix[: prefix.rfind("\n") + 1 or max(prefix.rfind(" "), 0)]
    reversed_rests = [text[len(prefix) :][::-1] for text in texts]
    suffix = _common_prefix(reversed_rests)
    # The suffix starts at a line break, so that the words before it are tokenized as everywhere
    # else.
    suffix = suffix[: suffix.rfind("\n") + 1][::-1]
    return prefix, suffix


def _common_prefix(texts: Sequence[str]) -> str:
    low = min(texts)
    high = max(texts)
    length = 0
    while length < len(low) and low[length] == high[length]:
        length += 1
    return low[:length]


def fixed_phrases(conversations: Iterable[Sequence[dict[str, Any]]]) -> list[str]:
    """Find the common starts and ends of all messages of one kind, over all conversations.

    Messages of the same role are of one kind, except for the last message of a conversation, which
    is another.
    """
    kinds: dict[tuple[str, bool], list[str]] = {}
    for messages in conversations:
        for i, message in enumerate(messages):
            kind = message["role"], i == len(messages) - 1
            if message["role"] != "assistant":
                kinds.setdefault(kind, []).append(message["content"])
    return [phrase for texts in kinds.values() for phrase in common_ends(texts) if len(phrase) > 3]
