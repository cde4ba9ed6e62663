"""What Megatron lacks without TransformerEngine and Apex: packed attention on a CPU, and a savable
optimizer.

`--spec tests.slime.cpu.megatron_on_cpu layer_spec` builds its own local layers under the parameter
names that TransformerEngine's layers have, because slime's weight conversion knows those.
"""

import os
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F


def layer_spec(args: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's `--spec` function: a layer spec for `GPTModel`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    norm_linear, attention = _modules()
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attention.submodules.linear_qkv = norm_linear
    parts.self_attention.submodules.core_attention = attention
    parts.mlp.submodules.linear_fc1 = norm_linear
    parts.sharded_state_dict_keys_map = {}
    return spec


def _modules() -> tuple[type, type]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule

    class NormLinear(ColumnParallelLinear):
        """RMSNorm and the linear layer behind it as one module, as TransformerEngine groups
        them."""

        def __init__(
            self, input_size: int, output_size: int, *, config: Any, **kwargs: Any
        ) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.layer_norm_weight = torch.nn.Parameter(
                torch.ones(input_size, dtype=config.params_dtype)
            )
            self.epsilon = config.layernorm_epsilon

        def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            weight = self.layer_norm_weight.to(hidden.dtype)
            return super().forward(
                F.rms_norm(hidden, weight.shape, weight, self.epsilon), *args, **kwargs
            )

    class PackedAttention(MegatronModule):
        """Causal attention inside each sequence of a packed batch; query [tokens, heads, width]."""

        def __init__(
            self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any
        ) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale

        def forward(
            self,
            query: Any,
            key: Any,
            value: Any,
            *_: Any,
            packed_seq_params: Any = None,
            **__: Any,
        ) -> Any:
            bounds = packed_seq_params.cu_seqlens_q.tolist()
            outputs = []
            for start, end in pairwise(bounds):
                q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
                mixed = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
                )
                outputs.append(mixed[0].transpose(0, 1))
            return torch.cat(outputs).reshape(query.shape[0], 1, -1)

    return NormLinear, PackedAttention


def patch_optimizer(module: ModuleType) -> None:
    """Let the distributed optimizer over torch's AdamW be saved before its first step, and loaded
    again."""
    optimizer = module.DistributedOptimizer
    save, load = optimizer.state_dict, optimizer.load_state_dict
    set_tensors = optimizer._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    zeros = {
                        name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
                    }
                    self.optimizer.state[parameter].update(step=torch.tensor(0.0), **zeros)
        return save(self)

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for entry in self.optimizer.state.values():
            # Megatron gives all parameters one step tensor, which torch's AdamW then counts up once
            # for each.
            entry["step"] = entry["step"].clone()

    def set_states(self: Any, parameter: Any, tensors: dict[str, torch.Tensor]) -> Any:
        if "step" in tensors:
            tensors = {**tensors, "step": tensors["step"].flatten()[0]}
        return set_tensors(self, parameter, tensors)

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict
    optimizer._set_main_param_and_optimizer_states = set_states


def choose_precision(module: ModuleType) -> None:
    """With SLIME_CPU_FP32=1 train in float32, which slime has no flag for: it knows bf16 and
    fp16."""
    if os.environ.get("SLIME_CPU_FP32") != "1":
        return
    set_defaults = module._set_default_megatron_args

    def in_float32(args: Any) -> Any:
        args = set_defaults(args)
        args.bf16 = False
        return args

    module._set_default_megatron_args = module.set_default_megatron_args = in_float32
