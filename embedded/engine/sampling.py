"""SGLang's sampling parameters, and the draw of one token per request.

Each request has its own random numbers, so its tokens do not depend on the requests that run beside
it.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import torch
from pydantic import model_validator
from torch import Tensor

from slime_verlog import ConfigError, Field, Settings

MAX_BIAS = 1e4


class SamplingParams(Settings):
    """How one request is sampled; names and defaults are SGLang's. Its other parameters are not
    supported."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the most likely tokens that together have at least this probability."""
    top_k: int = -1
    """Keep this many of the most likely tokens; -1 keeps all."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest response, in tokens."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end the response, besides the model's own."""
    ignore_eos: bool = False
    """Do not end at the model's own end tokens."""
    sampling_seed: int | None = None
    """Seed of the request's random numbers; by default each request gets another one."""
    no_stop_trim: bool = False
    """Leave the token that ended the response in its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the response's text."""
    spaces_between_special_tokens: bool = True
    """Without effect."""
    stop: None = None
    """Texts that end a response are not supported."""
    logit_bias: Mapping[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None = None
    """Added to the logits of tokens; the keys are token ids as text, as in SGLang."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k != -1 and not 1 <= self.top_k < 1 << 31:
            raise ConfigError(
                f"sampling_params.top_k must be -1 (off) or 1 to 2^31 - 1, got {self.top_k}"
            )
        for token in self.logit_bias or ():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ConfigError(
                    f"sampling_params.logit_bias has the key {token!r:.40}; keys are token ids"
                )
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1


def draw_uniforms(seed: int, count: int) -> list[float]:
    """Return the first `count` uniform random numbers in [0, 1) of the request with this seed."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


def sample_tokens(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draw one token per row of `logits` [rows, vocab]; return the tokens and their
    log-probabilities.

    As in SGLang, log-probabilities are of the biased, temperature-scaled distribution, before top-k
    and top-p.
    """
    if any(one.logit_bias for one in params):
        logits = logits.clone()
    for row, one in enumerate(params):
        for token, bias in (one.logit_bias or {}).items():
            logits[row, int(token)] += bias
    device = logits.device
    temperature = torch.tensor(
        [1.0 if one.greedy else one.temperature for one in params], device=device
    )
    log_probs = torch.log_softmax(logits.float() / temperature[:, None], -1)
    probs = log_probs.double().exp()
    for row, one in enumerate(params):
        if not one.greedy and (one.top_p < 1 or one.top_k > 0):
            probs[row] = _truncated(probs[row], one)
    cdf = probs.cumsum(-1)
    uniform = torch.tensor(uniforms, dtype=torch.float64, device=device)
    target = uniform[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    greedy = [row for row, one in enumerate(params) if one.greedy]
    if greedy:
        tokens[greedy] = log_probs[greedy].argmax(-1)
    chosen = log_probs.gather(-1, tokens[:, None])
    return tokens.tolist(), chosen.squeeze(-1).tolist()


def _truncated(probs: Tensor, params: SamplingParams) -> Tensor:
    """Set probabilities [vocab] outside top-k and top-p to 0; the most likely token always
    stays."""
    ordered, index = probs.sort(descending=True)
    keep = ordered.cumsum(-1) - ordered < params.top_p
    if params.top_k > 0:
        keep[params.top_k :] = False
    return torch.zeros_like(probs).scatter_(0, index, ordered * keep)
