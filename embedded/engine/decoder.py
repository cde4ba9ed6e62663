"""A Qwen2/Llama-shaped language model with a static key-value cache: one row per running request.

Invariant: `cache[..., row, :, :n, :]` holds the keys and values of the row's first n tokens, under
one set of weights. The forward pass is written by hand, because for small models on a CPU most time
goes into Python around the operators.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rollout.errors import CheckpointError, ConfigError

Weights = Mapping[str, Tensor]
"""Weights under Hugging Face names."""
SERVED_TYPES = ("qwen2", "llama", "qwen3", "mistral")
PREFILL_CHUNK = 512
"""Prompt tokens computed at once per row; this bounds the score matrix of a long prompt."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block. Projections of the same input are fused into one matrix."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    cache: Tensor
    """[2, rows, key-value heads, context, head_dim] keys and values."""


class RowDecoder(Protocol):
    """Computes next-token logits of several sequences, each in a row with its own cache."""

    rows: int
    vocab_size: int
    context_length: int

    def load_weights(self, state: Weights) -> None: ...
    def open_row(self, row: int, prompt: Sequence[int]) -> None: ...
    def copy_prefix(self, source: int, target: int, length: int) -> None: ...
    def prefill(
        self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[np.ndarray]
    ) -> Tensor: ...
    def decode(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> Tensor: ...


class Decoder:
    """Computes next-token logits for rows of a key-value cache."""

    def __init__(
        self,
        folder: str | Path,
        rows: int,
        context_length: int | None,
        device: str = "cpu",
        *,
        bf16: bool = False,
    ) -> None:
        """Load a Hugging Face model folder and allocate a cache of `rows` x `context_length`
        tokens.

        With `bf16`, weights, cache and computation are in bfloat16. Raises ConfigError as
        `load_hf_model`.
        """
        model = load_hf_model(folder)
        config = model.config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.layer_count = config.num_hidden_layers
        self.vocab_size = config.vocab_size
        self.context_length = context_length or min(config.max_position_embeddings, 4096)
        self.rows = rows
        self.device = torch.device(device)
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        self._cos, self._sin = self._rotary_table(model.model.rotary_emb)
        shape = (self.layer_count, 2, rows, self.kv_heads, self.context_length, self.head_dim)
        # NumPy's zeros take up memory only where they are written, so an unused context costs
        # nothing.
        zeros = torch.from_numpy(np.zeros(shape, dtype=f"i{self._dtype.itemsize}"))
        self.cache = zeros.view(self._dtype).to(self.device)
        self.load_weights(model.state_dict())

    def _rotary_table(self, rotary: Any) -> tuple[Tensor, Tensor]:
        """Compute cosines and signed sines [length, 1, head_dim], as `_rotate` takes them."""
        positions = torch.arange(self.context_length, dtype=torch.float32)
        frequencies = rotary.inv_freq.float().cpu()
        angles = torch.outer(positions, frequencies)[:, None]
        cos = angles.cos() * rotary.attention_scaling
        sin = angles.sin() * rotary.attention_scaling
        return torch.cat([cos, cos], -1).to(self.device), torch.cat([-sin, sin], -1).to(self.device)

    def load_weights(self, state: Weights) -> None:
        """Copy in weights under Hugging Face names; raises ConfigError, before any change, if they
        do not fit."""
        weights = {}
        for name, tensor in state.items():
            weights[name] = tensor.detach().to(self.device, self._dtype, copy=True)
        try:
            embed = weights["model.embed_tokens.weight"]
            norm = weights["model.norm.weight"]
            layers = [self._read_layer(weights, number) for number in range(self.layer_count)]
        except KeyError as error:
            raise ConfigError(
                f"the new weights lack {error}, so they belong to another model"
            ) from error
        if (
            embed.shape[0] != self.vocab_size
            or f"model.layers.{self.layer_count}.mlp.down_proj.weight" in weights
        ):
            raise ConfigError(
                f"the new weights belong to another model: their vocabulary has {embed.shape[0]} "
                f"entries, while the served model has {self.vocab_size} and {self.layer_count} "
                "layers; start the engine with that model"
            )
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = weights.get("lm_head.weight", embed)

    def _read_layer(self, weights: Weights, number: int) -> Layer:
        prefix = f"model.layers.{number}."
        attention = f"{prefix}self_attn."
        mlp = f"{prefix}mlp."
        qkv = torch.cat([weights[f"{attention}{x}_proj.weight"] for x in "qkv"])
        biases = [weights[name] for x in "qkv" if (name := f"{attention}{x}_proj.bias") in weights]
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        if qkv.shape[0] != width:
            raise ConfigError(
                f"{prefix}self_attn has {qkv.shape[0]} outputs, but the served model has {width}"
            )
        return Layer(
            input_norm=weights[f"{prefix}input_layernorm.weight"],
            qkv=qkv,
            qkv_bias=torch.cat(biases) if biases else None,
            q_norm=weights.get(f"{attention}q_norm.weight"),
            k_norm=weights.get(f"{attention}k_norm.weight"),
            out=weights[f"{attention}o_proj.weight"],
            mlp_norm=weights[f"{prefix}post_attention_layernorm.weight"],
            gate_up=torch.cat([weights[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")]),
            down=weights[f"{mlp}down_proj.weight"],
            cache=self.cache[number],
        )

    def open_row(self, row: int, prompt: Sequence[int]) -> None:
        """Prepare a row for a new prompt; a decoder with images keeps them here."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` cached tokens of one row into another."""
        if source != target and length:
            self.cache[:, :, target, :, :length] = self.cache[:, :, source, :, :length]

    @torch.inference_mode()
    def prefill(
        self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[np.ndarray]
    ) -> Tensor:
        """Compute new tokens of several rows, each from its own start; returns the last logits
        [rows, vocab]."""
        logits = torch.empty(len(rows), self.vocab_size, device=self.device)
        longest = max(map(len, tokens))
        for offset in range(0, longest, PREFILL_CHUNK):
            live = [i for i, ids in enumerate(tokens) if len(ids) > offset]
            chunks = [tokens[i][offset : offset + PREFILL_CHUNK] for i in live]
            begins = [starts[i] + offset for i in live]
            logits[live] = self._forward([rows[i] for i in live], begins, chunks)
        return logits

    @torch.inference_mode()
    def decode(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> Tensor:
        """Compute one token per row, at its position; returns logits [rows, vocab]."""
        row = self._tensor(rows)
        position = self._tensor(positions)
        keys = int(positions.max()) + 1
        used = int(rows.max()) + 1
        ratio = self.heads // self.kv_heads
        # Attend over all rows up to the highest in one strided view: idle rows cost less than a
        # gather would.
        mask = torch.full((used, 1, 1, keys), -torch.inf, device=self.device)
        mask[:, 0, 0, 0] = 0.0
        visible = torch.arange(keys, device=self.device) <= position[:, None]
        mask[row, 0, 0] = torch.where(visible, 0.0, -torch.inf)
        x = self.embed[self._tensor(tokens)]
        rotation = self._cos[position], self._sin[position]
        for layer in self.layers:
            q = self._project(x, layer, row, position, rotation)
            query = q.new_zeros(used, self.kv_heads, ratio, self.head_dim)
            query[row] = q.view(len(rows), self.kv_heads, ratio, self.head_dim)
            k, v = layer.cache[:, :used, :, :keys]
            # For a single query per row, the fused kernel is slower.
            scores = torch.matmul(query, k.transpose(-1, -2))
            scores.mul_(self.head_dim**-0.5).add_(mask)
            probs = torch.softmax(scores, -1)
            attended = torch.matmul(probs, v)[row]
            x = self._finish(x, attended.flatten(1), layer)
        return self._logits(x)

    def _forward(self, rows: list[int], starts: list[int], tokens: list[np.ndarray]) -> Tensor:
        lengths = np.array([len(ids) for ids in tokens])
        width = int(lengths.max())
        groups = np.repeat(np.arange(len(rows)), lengths)
        columns = np.concatenate([np.arange(n) for n in lengths])
        positions = np.repeat(starts, lengths) + columns
        group = self._tensor(groups)
        column = self._tensor(columns)
        position = self._tensor(positions)
        row = self._tensor(np.array(rows))
        keys = int(position.max()) + 1
        # Padding queries see the first key, so that no softmax is empty.
        limit = torch.zeros(len(rows), width, dtype=torch.long, device=self.device)
        limit[group, column] = position
        visible = torch.arange(keys, device=self.device) <= limit[..., None]
        ratio = self.heads // self.kv_heads
        mask = torch.where(visible, 0.0, -torch.inf).to(self._dtype)
        mask = mask.repeat(1, ratio, 1)[:, None]
        ids = self._tensor(np.concatenate(tokens))
        x = self.embed[ids]
        rotation = self._cos[position], self._sin[position]
        for layer in self.layers:
            q = self._project(x, layer, row[group], position, rotation)
            query = q.new_zeros(len(rows), width, self.kv_heads, ratio, self.head_dim)
            query[group, column] = q.view(-1, self.kv_heads, ratio, self.head_dim)
            query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)
            k, v = layer.cache[:, row, :, :keys]
            attended = F.scaled_dot_product_attention(query, k, v, attn_mask=mask)
            attended = attended.unflatten(2, (ratio, width))[group, :, :, column]
            x = self._finish(x, attended.flatten(1), layer)
        last = self._tensor(np.cumsum(lengths) - 1)
        return self._logits(x[last])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _project(
        self,
        x: Tensor,
        layer: Layer,
        row: Tensor,
        position: Tensor,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Compute queries [n, heads, head_dim], and write keys and values into the cache."""
        normed = self._norm(x, layer.input_norm)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        queries_and_keys, values = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = queries_and_keys.split([self.heads, self.kv_heads], 1)
            normed_q = self._norm(q, layer.q_norm)
            normed_k = self._norm(k, layer.k_norm)
            queries_and_keys = torch.cat([normed_q, normed_k], 1)
        rotated = _rotate(queries_and_keys, *rotation).to(self._dtype)
        keys_of_rows, values_of_rows = layer.cache
        keys_of_rows[row, :, position] = rotated[:, self.heads :]
        values_of_rows[row, :, position] = values
        return rotated[:, : self.heads]

    def _finish(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        x = x + F.linear(attended, layer.out)
        normed = self._norm(x, layer.mlp_norm)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _logits(self, x: Tensor) -> Tensor:
        normed = self._norm(x, self.norm)
        return F.linear(normed, self.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def load_hf_model(folder: str | Path) -> Any:
    """Load a Hugging Face causal language model in float32; raises ConfigError if it is not
    served."""
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"'{folder}' is not a model folder: it has no config.json; give a Hugging Face model "
            "folder"
        )
    config = AutoConfig.from_pretrained(folder)
    kind = config.model_type
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kind not in SERVED_TYPES or layer_types != {"full_attention"}:
        found = f"'{folder}' holds a {kind} model with {', '.join(sorted(layer_types))}"
        served = f"the embedded engine serves {', '.join(SERVED_TYPES)} with full attention"
        raise ConfigError(f"{found}; {served}. Serve it with SGLang instead")
    longest = config.max_position_embeddings
    unserved = {
        "attention_bias": kind in ("llama", "qwen3") and config.attention_bias,
        "mlp_bias": kind == "llama" and config.mlp_bias,
        "hidden_act": config.hidden_act not in ("silu", "swish"),
        "sliding_window": kind == "mistral" and (config.sliding_window or longest) < longest,
    }
    for name, is_set in unserved.items():
        if is_set:
            found = f"'{folder}' has {name}: {getattr(config, name)} in its config.json"
            not_computed = "which embedded engine and trainer do not compute"
            raise ConfigError(f"{found}, {not_computed}. Serve it with SGLang instead")
    with loading(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@contextmanager
def loading(folder: str | Path) -> Iterator[None]:
    """Raise ConfigError for files that transformers cannot load, such as those of a folder that was
    copied in part."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"'{folder}' cannot be loaded: {error}; copy the whole folder again"
        ) from error


def write_policy(source: str | Path, weights: Weights, folder: Path) -> None:
    """Write `weights` with the configuration and tokenizer of the Hugging Face folder `source`.

    An earlier policy in `folder` is replaced in one step, so that an interrupted run leaves no
    half-written one. Raises CheckpointError if the folder cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(
            source, temporary, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*", ".*")
        )
        tensors = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()
        }
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the policy cannot be written to {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
