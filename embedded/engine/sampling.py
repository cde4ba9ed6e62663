"""SGLang's sampling parameters, checked, and the draw of one token a request.

Each request draws from a generator of its own, so what it gets does not depend on which requests run beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from envs.options import read_options
from rollout.errors import ConfigError

NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "spaces_between_special_tokens": None,
}
"""Parameters of SGLang that are accepted only at the value that does nothing; None: whatever the value, nothing."""

MOST_BIASES, LARGEST_BIAS = 1024, 1e4
MOST_STOPS, LONGEST_STOP = 64, 1024

IGNORED = ("spaces_between_special_tokens",)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; names and defaults are SGLang's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[str, float] | None = None
    """Added to the logits of tokens; the keys are token ids, as texts, as in SGLang."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"sampling_params.temperature must be >= 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling_params.top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != -1 and not 1 <= self.top_k < 1 << 31:
            raise ConfigError(f"sampling_params.top_k must be -1 (off) or 1 to 2^31 - 1, got {self.top_k}")
        self._check_bias(self.logit_bias or {})
        self._check_stops()
        if self.max_new_tokens < 1:
            raise ConfigError(f"sampling_params.max_new_tokens must be at least 1, got {self.max_new_tokens}")

    def _check_bias(self, given: Mapping[str, float]) -> None:
        if len(given) > MOST_BIASES:
            raise ConfigError(f"sampling_params.logit_bias has {len(given)} tokens; at most {MOST_BIASES} are served")
        for token, bias in given.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ConfigError(f"sampling_params.logit_bias has the key {token!r:.40}; keys are token ids")
            if not abs(bias) <= LARGEST_BIAS:
                raise ConfigError(
                    f"sampling_params.logit_bias of token {token} is {bias}; it must be between -{LARGEST_BIAS:g} "
                    f"and {LARGEST_BIAS:g}"
                )

    def _check_stops(self) -> None:
        stops, ids = self.stop_strings, self.stop_token_ids or ()
        if len(stops) > MOST_STOPS or len(ids) > MOST_STOPS:
            raise ConfigError(
                f"sampling_params.stop and stop_token_ids have {len(stops)} and {len(ids)} entries; at most "
                f"{MOST_STOPS} of each are served"
            )
        if any(not 1 <= len(stop) <= LONGEST_STOP for stop in stops):
            raise ConfigError(f"each of sampling_params.stop must have 1 to {LONGEST_STOP} characters")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()


def read_sampling_params(mapping: Mapping[str, Any] | None) -> SamplingParams:
    """Check the `sampling_params` of a request.

    Raises:
        ConfigError: unknown name, wrong type, impossible value, or a feature that this engine does not have.
    """
    if not isinstance(mapping, Mapping | None):
        raise ConfigError(f"sampling_params must be a mapping, got {mapping!r}")
    given = dict(mapping or {})
    for name, neutral in NEUTRAL.items():
        value = given.pop(name, neutral)
        if value != neutral and value is not None and name not in IGNORED:
            raise ConfigError(f"sampling_params.{name}={value!r} is not served by the embedded engine; leave it out")
    try:
        return read_options(SamplingParams, given, "sampling_params.")
    except OverflowError as error:
        raise ConfigError(f"sampling_params holds a number that is too large: {error}") from error


def draw_uniforms(seed: int, count: int) -> list[float]:
    """The `count` uniform numbers in [0, 1) that the request with this seed draws its tokens with."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


def sample_tokens(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draw one token a row of `logits` [rows, vocab]; return the tokens and their log-probabilities.

    As in SGLang, log-probabilities are those of the temperature-scaled distribution before top-k and top-p.
    """
    logits = _biased(logits, params)
    temperature = torch.tensor([1.0 if p.greedy else p.temperature for p in params], device=logits.device)
    log_probs = torch.log_softmax(logits.float() / temperature[:, None], -1)
    probs = log_probs.double().exp()
    for i, p in enumerate(params):
        if not p.greedy and (p.top_p < 1 or p.top_k > 0):
            probs[i] = _keep_nucleus(probs[i], p.top_k, p.top_p)
    cdf = probs.cumsum(-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    greedy = [i for i, p in enumerate(params) if p.greedy]
    if greedy:
        tokens[greedy] = log_probs[greedy].argmax(-1)
    return tokens.tolist(), log_probs.gather(-1, tokens[:, None]).squeeze(-1).tolist()


def _biased(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The logits with each request's bias added; log-probabilities are those after it, as in SGLang."""
    if not any(p.logit_bias for p in params):
        return logits
    biased = logits.clone()
    for row, p in enumerate(params):
        for token, bias in (p.logit_bias or {}).items():
            biased[row, int(token)] += bias
    return biased


def _keep_nucleus(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Zero what top-k and top-p leave out; the most likely token always stays."""
    ordered, index = probs.sort(descending=True)
    keep = (ordered.cumsum(-1) - ordered) < top_p
    if top_k > 0:
        keep[top_k:] = False
    return torch.zeros_like(probs).scatter_(0, index, ordered * keep)
