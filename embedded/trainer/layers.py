"""Parts of a Megatron-core layer for small models on a CPU: fewer passes over memory than the stock ones.

They replace three parts through Megatron's layer spec; each computes what the stock part does, up to rounding:
1. core attention: stock code masks with fused CUDA kernels; here causal attention without a mask tensor, because
   batches are padded on the right, where no real token attends to padding;
2. rotary embeddings: stock code moves angles to the current CUDA device and copies queries and keys several times;
   here the core attention rotates them, so the model is built without position embeddings;
3. RMS norms: PyTorch has no fused backward pass on a CPU; here it is written out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 256
"""Longest sequence whose attention probabilities are kept for the backward pass."""


class RmsNorm(torch.nn.Module):
    """Megatron's RMS norm over the last dimension."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., hidden]."""
        return _RmsNorm.apply(x, self.weight, self.eps)


class CausalAttention(torch.nn.Module):
    """Core attention with rotary embeddings.

    `first` is the first position whose output is needed; the outputs before it are zeros.
    """

    def __init__(self, *_: Any, rotary_base: float, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.rotary_base, self.scale, self.first = rotary_base, softmax_scale, 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend over [sequence, batch, heads, head_dim]; returns [sequence, batch, heads x head_dim]."""
        length, batch, _, width = query.shape
        cos, sin = rotary_table(length, width, self.rotary_base, query.device)
        k, v = _Rotate.apply(key, cos, sin), value.permute(1, 2, 0, 3)
        scale = self.scale or width**-0.5
        if length <= SHORT and query.device.type == "cpu":
            q = _Rotate.apply(query[self.first :], cos[self.first :], sin[self.first :])
            out = _ShortAttention.apply(q, k, v, scale)
        else:
            q = _Rotate.apply(query, cos, sin)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            out = out[:, :, self.first :]
        out = out.permute(2, 0, 1, 3).reshape(length - self.first, batch, -1)
        return F.pad(out, (0, 0, 0, 0, self.first, 0)) if self.first else out


@lru_cache(maxsize=64)
def rotary_table(length: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, width / 2] of rotary embeddings for heads of this width."""
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, scale = ctx.saved_tensors
        (grad,) = grads
        products = (grad * normed).view(-1, weight.shape[0])
        along = (products @ weight).div_(weight.shape[0]).view_as(scale)
        return (grad * weight).addcmul_(normed, along, value=-1).mul_(scale), products.sum(0), None


class _Rotate(torch.autograd.Function):
    """Rotary embedding of [sequence, batch, heads, width]; returns [batch, heads, sequence, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x.permute(1, 2, 0, 3), cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin).permute(2, 0, 1, 3), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., sequence, width] by angles [sequence, width / 2]; the result is contiguous."""
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x, torch.cat([cos, cos], -1), out=out)
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


class _ShortAttention(torch.autograd.Function):
    """Causal attention with plain matrix products, faster than PyTorch's kernel for short sequences on a CPU.

    Queries are the last positions of the keys: [batch, heads, n, width] against [batch, groups, length, width].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, heads, n, width = q.shape
        groups, length = k.shape[1:3]
        keys, values = (x.reshape(batch * groups, length, width) for x in (k, v))
        queries = q.reshape(batch * groups, -1, width)
        scores = torch.bmm(queries, keys.transpose(1, 2))
        hidden = torch.full((n, length), -torch.inf, device=q.device).triu(length - n + 1)
        scores.mul_(scale).view(-1, n, length).add_(hidden)
        probs = torch.softmax(scores, -1)
        ctx.save_for_backward(queries, keys, values, probs)
        ctx.scale, ctx.shapes = scale, (q.shape, k.shape)
        return torch.bmm(probs, values).view(batch, heads, n, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, probs = ctx.saved_tensors
        grad = grads[0].reshape(queries.shape)
        of_probs = torch.bmm(grad, values.transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_probs, probs, -1, probs.dtype).mul_(ctx.scale)
        of_values = torch.bmm(probs.transpose(1, 2), grad)
        of_keys = torch.bmm(of_scores.transpose(1, 2), queries)
        shape, shared = ctx.shapes
        return torch.bmm(of_scores, keys).view(shape), of_keys.view(shared), of_values.view(shared), None
