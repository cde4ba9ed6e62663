"""Megatron-core models on one device, CPU included: GPTModel actor and critic from a Hugging Face
folder.

Parts that need a GPU, or are slow without one, are replaced: attention, rotary embeddings and RMS
norms by `embedded.trainer.layers`, and clipping of gradient norms, which stock code does in memory
on "cuda", by torch's own.

Weights of Qwen2-, Qwen3- and Llama-shaped models have other names in Megatron-core, which fuses the
queries, keys and values of each group into one matrix, and gate and up projection into another.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from advantage.hl_gauss import HlGauss
from embedded.arguments import OptimizerFlags
from embedded.trainer.layers import CausalAttention, Places, RmsNorm, shared
from rollout.errors import ConfigError, MissingDependencyError

with warnings.catch_warnings():
    # Megatron warns about each fused kernel that is not installed; none is needed here.
    warnings.simplefilter("ignore")
    try:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import initialize_rng_tracker
        from megatron.core.transformer import TransformerConfig
    except ImportError as missing:
        raise MissingDependencyError(
            f"the embedded trainer needs {missing.name}; install it with: pip install "
            "'slime-verlog[embedded]'"
        ) from missing

_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",  # only Qwen3 has these two
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Megatron-core's names of a layer's weights that are not fused, and Hugging Face's."""


def initialize(port: int = 0) -> torch.device:
    """Make this process Megatron's only rank (gloo on a CPU, NCCL on a GPU). Safe to call twice."""
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if not torch.distributed.is_initialized():
        store = TCPStore("127.0.0.1", port, world_size=1, is_master=True)
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        parallel_state.initialize_model_parallel()
        initialize_rng_tracker(inference_rng_tracker=True)
    return device


def build_model(
    folder: str | Path,
    device: torch.device,
    *,
    critic: bool = False,
    bf16: bool = False,
    bins: HlGauss | None = None,
) -> GPTModel:
    """Build a GPTModel with the folder's weights. A critic gets an untied head, whose outputs are
    those of `ValueHead`.

    Weights are float32; with `bf16`, `precision` lets the model multiply in bfloat16. Raises
    ConfigError for a model of an unsupported shape.
    """
    from embedded.engine.decoder import load_hf_model

    hf = load_hf_model(folder)
    is_tied = hf.config.tie_word_embeddings and not critic
    model = _empty_model(hf.config, tied=is_tied, bf16=bf16)
    if critic:
        model.output_layer = ValueHead(hf.config.hidden_size, bins)  # type: ignore[assignment]
    weights = hf_to_megatron(hf.state_dict(), hf.config, head=not critic)
    model.load_state_dict(weights, strict=False)
    return model.to(device)


def _empty_model(config: Any, *, tied: bool, bf16: bool) -> GPTModel:
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ConfigError(
            f"the trainer takes plain rotary embeddings only, but this model has {kind} ones"
        )
    is_qwen3 = config.model_type == "qwen3"
    transformer = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=is_qwen3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        enable_autocast=bf16,
        autocast_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        # The folder's weights replace these at once.
        perform_initialization=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=is_qwen3)
    block: Any = spec.submodules
    block.input_layernorm = block.pre_mlp_layernorm = RmsNorm
    block.self_attention.submodules.core_attention = partial(
        CausalAttention, rotary_base=rope["rope_theta"]
    )
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=tied,
        # The core attention rotates queries and keys.
        position_embedding_type="none",
    )
    model.decoder.final_layernorm = RmsNorm(transformer, config.hidden_size, config.rms_norm_eps)
    return model


class ValueHead(torch.nn.Linear):
    """One output per position, or one per bin, whose value is initially 0; returns (outputs, None),
    as Megatron's."""

    def __init__(self, hidden: int, bins: HlGauss | None) -> None:
        super().__init__(hidden, 1 if bins is None else bins.bins)
        torch.nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(torch.zeros(1) if bins is None else bins.start_bias())

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """Outputs [..., 1 or bins], float32, of hidden states [..., hidden]."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            # In bf16, bins would move values by 0.3 %.
            return super().forward(hidden_states.float()), None


@contextmanager
def _packed(model: GPTModel, places: Places, wanted: Tensor) -> Iterator[None]:
    """Inside this context the model reads packed tokens, and after the last attention it computes
    `wanted` only.

    Logits are [1, n, outputs] for n wanted tokens. No attention follows, so the last MLP can skip
    all other tokens. The hook is on the module between the last layer's attention and its MLP,
    which does nothing in a model without cross-attention.
    """
    layers = model.decoder.layers
    between = layers[-1].get_submodule("pre_cross_attn_layernorm")
    handle = between.register_forward_hook(lambda _, __, hidden: hidden[wanted])
    attentions: list[Any] = [
        layer.get_submodule("self_attention.core_attention") for layer in layers
    ]
    for attention in attentions:
        attention.places = places
    attentions[-1].first = int(places.column[wanted].min())
    try:
        yield
    finally:
        handle.remove()


def precision(model: GPTModel) -> torch.autocast:
    """Return the context for the model's forward and backward pass: Megatron's autocast, where the
    model has it."""
    device = next(model.parameters()).device
    return torch.autocast(
        device.type, model.config.autocast_dtype, enabled=model.config.enable_autocast
    )


def predict(model: GPTModel, ids: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Compute outputs [n, width] in float32 at positions (row, column) of right-padded `ids`
    [batch, length].

    Only the tokens up to each row's last wanted position are computed, and equal beginnings of rows
    once, which saves most of the work if turns have much of their prompts in common.
    """
    lengths = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    lengths.scatter_reduce_(0, row, column + 1, "amax")
    packed, places, row_of = shared(ids, lengths)
    tokens = places.tokens[row_of[row], column]
    wanted, of_each = tokens.unique(return_inverse=True)
    with precision(model), _packed(model, places, wanted):
        outputs = model(packed[None], None, None)[0]
        return outputs.float().index_select(0, of_each)


class Adam(torch.optim.AdamW):
    """AdamW that decays matrices only. `schedule.step(n)` is Megatron's: it moves the learning rate
    on by n samples."""

    def __init__(self, model: GPTModel, flags: OptimizerFlags, lr: float, samples: int) -> None:
        """The learning rate starts at `lr` and follows `flags.lr_decay_style` over that many
        samples."""
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "wd_mult": 0.0}]
        betas = flags.adam_beta1, flags.adam_beta2
        super().__init__(groups, lr=lr, betas=betas, eps=flags.adam_eps, fused=True)
        self._parameters = [*matrices, *others]
        self._clip_grad = flags.clip_grad
        own: Any = self  # Megatron's scheduler takes any optimizer that has parameter groups
        self.schedule = OptimizerParamScheduler(
            own,
            init_lr=0.0,
            max_lr=lr,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=samples,
            lr_decay_style=flags.lr_decay_style,
            start_wd=flags.weight_decay,
            end_wd=flags.weight_decay,
            wd_incr_steps=samples,
            wd_incr_style="constant",
        )

    def clip(self) -> float:
        """Scale all gradients to a joint norm of at most `clip_grad`, and return the norm
        before."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_grad).item()


def hf_to_megatron(
    state: Mapping[str, Tensor], config: Any, *, head: bool = True
) -> dict[str, Tensor]:
    """Rename and fuse the weights of a model with this Hugging Face config; without `head`, no
    output layer."""
    out = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if head and "lm_head.weight" in state:
        out["output_layer.weight"] = state["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        source = f"model.layers.{i}."
        target = f"decoder.layers.{i}."
        for new, old in _NAMES.items():
            if source + old in state:
                out[target + new] = state[source + old]
        for kind in ("weight", "bias"):
            projections = [f"{source}self_attn.{x}_proj.{kind}" for x in "qkv"]
            if projections[0] in state:
                grouped = [_grouped(state[name], config) for name in projections]
                out[f"{target}self_attention.linear_qkv.{kind}"] = torch.cat(grouped, 1).flatten(
                    0, 2
                )
        gate_up = [state[f"{source}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        out[target + "mlp.linear_fc1.weight"] = torch.cat(gate_up)
    return out


def megatron_to_hf(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Invert `hf_to_megatron`, without a critic's head and without Megatron's extra states."""
    embedding = state["embedding.word_embeddings.weight"]
    out = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": state["decoder.final_layernorm.weight"],
    }
    head = state.get("output_layer.weight")
    if head is not None and head.shape == embedding.shape:
        out["lm_head.weight"] = head
    for i in range(config.num_hidden_layers):
        source = f"decoder.layers.{i}."
        target = f"model.layers.{i}."
        for new, old in _NAMES.items():
            if source + new in state:
                out[target + old] = state[source + new]
        for kind in ("weight", "bias"):
            fused = state.get(f"{source}self_attention.linear_qkv.{kind}")
            if fused is not None:
                grouped = _grouped(fused, config)
                queries = grouped.shape[1] - 2
                for x, part in zip("qkv", grouped.split([queries, 1, 1], 1), strict=True):
                    out[f"{target}self_attn.{x}_proj.{kind}"] = part.flatten(0, 2)
        gate, up = state[source + "mlp.linear_fc1.weight"].chunk(2)
        out[target + "mlp.gate_proj.weight"] = gate
        out[target + "mlp.up_proj.weight"] = up
    return {name: tensor.detach() for name, tensor in out.items()}


def _grouped(weights: Tensor, config: Any) -> Tensor:
    """View weights or biases of projections as [key-value heads, heads of a group, width of a head,
    ...]."""
    return weights.unflatten(0, (config.num_key_value_heads, -1, head_dim(config)))


def head_dim(config: Any) -> int:
    """Read the width of one attention head from a Hugging Face model config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
