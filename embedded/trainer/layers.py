"""Parts of a Megatron-core layer for small models on a CPU: fewer passes over memory than the stock
ones.

They replace three parts through Megatron's layer spec; each computes what the stock part does, up
to rounding:
1. core attention: stock code masks with fused CUDA kernels; here causal attention without a mask
   tensor, because batches are padded on the right, where no real token attends to padding;
2. rotary embeddings: stock code moves angles to the current CUDA device and copies queries and keys
   several times; here the core attention rotates them, so the model is built without position
   embeddings;
3. RMS norms: PyTorch has no fused backward pass on a CPU; here it is written out.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
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


@dataclass(frozen=True)
class Places:
    """Where packed tokens stand in a padded batch whose rows may share tokens: those of equal
    beginnings."""

    row: Tensor
    """[tokens] first row of each token."""
    column: Tensor
    """[tokens] position of each token in its rows."""
    tokens: Tensor
    """[rows, columns] the token at each place of the padded batch; padding has any token."""

    @cached_property
    def hidden(self) -> Tensor:
        """[columns, columns] what a score of query and key is increased by: minus infinity if the
        key is later."""
        columns = self.tokens.shape[1]
        everything = torch.full((columns, columns), -torch.inf, device=self.row.device)
        return everything.triu(1)

    def indices(self, heads: int) -> tuple[Tensor, Tensor]:
        """Token and head of each padded [row, head, column], and a place of each token and head."""
        if heads not in self._indices:
            head = torch.arange(heads, device=self.row.device)
            token = self.tokens[:, None] * heads + head[:, None]
            row_and_head = self.row[:, None] * heads + head
            place = row_and_head * self.tokens.shape[1] + self.column[:, None]
            self._indices[heads] = token.flatten(), place.flatten()
        return self._indices[heads]

    @cached_property
    def _indices(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}


def shared(ids: Tensor, lengths: Tensor) -> tuple[Tensor, Places, Tensor]:
    """Pack the first `lengths` tokens of right-padded rows `ids` [rows, columns]; equal beginnings
    are packed once.

    A causal model computes the same for each of these, so results and gradients stay the same up to
    rounding. Returns the packed ids [tokens], their places, and for each given row the row of the
    places that holds its tokens.
    """
    columns = int(lengths.max())
    padding = torch.arange(columns, device=ids.device) >= lengths[:, None]
    tokens = ids[:, :columns].masked_fill(padding, -1)
    rows, row_of = tokens.unique(dim=0, return_inverse=True)
    # Rows are sorted, so a beginning is new where it differs from that of the row before.
    differs = (rows[1:] != rows[:-1]).cumsum(1) > 0
    new = F.pad(differs, (0, 0, 1, 0), value=True)
    is_packed = new & (rows >= 0)
    row, column = is_packed.nonzero(as_tuple=True)
    number = torch.arange(len(rows), device=ids.device)[:, None]
    first_row = (new * number).cummax(0).values
    place = is_packed.flatten().cumsum(0).view_as(rows) - 1
    token_at = place.gather(0, first_row).clamp_min(0)
    return rows[row, column], Places(row, column, token_at), row_of


class CausalAttention(torch.nn.Module):
    """Core attention with rotary embeddings.

    The tokens of a batch are packed into one row; `places` are set before it is called. `first` is
    the first column whose output is needed; outputs before it may be zeros.
    """

    places: Places

    def __init__(
        self, *_: Any, rotary_base: float, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__()
        self.rotary_base = rotary_base
        self.scale = softmax_scale
        self.first = 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend over [sequence, batch, heads, head_dim]; returns [sequence, batch, heads x
        head_dim]."""
        length, batch, heads, width = query.shape
        places = self.places
        first = self.first
        scale = self.scale or width**-0.5
        columns = places.tokens.shape[1]
        cosines, sines = rotary_table(columns, width, self.rotary_base, query.device)
        cos = cosines[places.column, None]
        sin = sines[places.column, None]
        q = _Padded.apply(query, places, cos, sin)
        k = _Padded.apply(key, places, cos, sin)
        v = _Padded.apply(value, places, None, None)
        if columns <= SHORT and query.device.type == "cpu":
            out = _ShortAttention.apply(q[:, :, first:], k, v, places.hidden[first:], scale)
            out = F.pad(out, (0, 0, first, 0))
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
        place = places.indices(heads)[1]
        packed = out.reshape(-1, width).index_select(0, place)
        return packed.view(length, batch, heads * width)


@lru_cache(maxsize=64)
def rotary_table(
    length: int, width: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [length, width / 2] of rotary embeddings for heads of this
    width."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / base**exponents)
    return angles.cos().to(device), angles.sin().to(device)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=weight.dtype)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, scale = ctx.saved_tensors
        (grad,) = grads
        width = weight.shape[0]
        products = (grad * normed).view(-1, width)
        along = (products @ weight).div_(width).view_as(scale)
        of_x = (grad * weight).addcmul_(normed, along, value=-1).mul_(scale)
        return of_x, products.sum(0), None


class _Padded(torch.autograd.Function):
    """Tokens [..., heads, width] as a padded batch [rows, heads, columns, width], rotated if there
    are angles."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, places: Places, cos: Tensor | None, sin: Tensor | None
    ) -> Tensor:
        ctx.shape = x.shape
        ctx.places = places
        ctx.cos = cos
        ctx.sin = sin
        heads, width = x.shape[-2:]
        tokens = x.view(-1, heads, width)
        if cos is not None and sin is not None:
            tokens = _rotated(tokens, cos, sin)
        token, _ = places.indices(heads)
        padded = tokens.reshape(-1, width).index_select(0, token)
        return padded.view(-1, heads, places.tokens.shape[1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        heads, width = ctx.shape[-2:]
        padded = grads[0].reshape(-1, width)
        token, _ = ctx.places.indices(heads)
        # The sum is float32 for bfloat16, too.
        total = torch.zeros(len(ctx.places.row) * heads, width, device=padded.device)
        total.index_add_(0, token, padded.float())
        grad = total.to(padded.dtype).view(-1, heads, width)
        if ctx.cos is not None:
            grad = _rotated(grad, ctx.cos, -ctx.sin)
        return grad.view(ctx.shape), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [tokens, heads, width] by angles [tokens, 1, width / 2]; the result is contiguous."""
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x, torch.cat([cos, cos], -1), out=out)
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


class _ShortAttention(torch.autograd.Function):
    """Causal attention with plain matrix products, faster than PyTorch's kernel for short sequences
    on a CPU.

    Queries [batch, heads, n, width], keys and values [batch, groups, length, width], `hidden` [n,
    length].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
        keys = k.flatten(0, 1)
        values = v.flatten(0, 1)
        queries = q.reshape(len(keys), -1, k.shape[-1])
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
        scores.view(-1, *hidden.shape).add_(hidden)
        probs = torch.softmax(scores, -1)
        ctx.save_for_backward(queries, keys, values, probs)
        ctx.scale = scale
        ctx.shapes = (q.shape, k.shape)
        return torch.bmm(probs, values).view(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, values, probs = ctx.saved_tensors
        grad = grads[0].reshape(queries.shape)
        of_probs = torch.bmm(grad, values.transpose(1, 2))
        of_scores = torch.ops.aten._softmax_backward_data(of_probs, probs, -1, probs.dtype)
        of_scores.mul_(ctx.scale)
        of_queries = torch.bmm(of_scores, keys)
        of_keys = torch.bmm(of_scores.transpose(1, 2), queries)
        of_values = torch.bmm(probs.transpose(1, 2), grad)
        of_q, of_k = ctx.shapes
        return of_queries.view(of_q), of_keys.view(of_k), of_values.view(of_k), None, None
