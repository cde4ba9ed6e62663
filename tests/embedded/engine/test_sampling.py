"""Sampled tokens follow the distribution that the parameters define."""

import pytest
import torch

from embedded.engine.sampling import SamplingParams, draw_uniforms, sample_tokens


def frequencies(logits: torch.Tensor, params: SamplingParams, draws: int = 8_000) -> torch.Tensor:
    tokens, _ = sample_tokens(logits.expand(draws, -1), [params] * draws, draw_uniforms(0, draws))
    return torch.bincount(torch.tensor(tokens), minlength=logits.numel()) / draws


LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -30.0])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_token_frequencies_match_the_temperature_scaled_softmax(temperature: float) -> None:
    found = frequencies(LOGITS, SamplingParams(temperature=temperature))
    assert torch.allclose(found, torch.softmax(LOGITS / temperature, -1), atol=0.02)


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(2, 1.0, 2), (-1, 0.65, 2)])
def test_top_k_and_top_p_leave_only_the_likeliest_in_proportion(
    top_k: int, top_p: float, kept: int
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p)
    wanted = torch.softmax(LOGITS, -1)
    wanted[kept:] = 0
    assert torch.allclose(frequencies(LOGITS, params), wanted / wanted.sum(), atol=0.02)


def test_log_probs_are_of_the_whole_temperature_scaled_distribution() -> None:
    params = SamplingParams(temperature=0.5, top_k=2)
    tokens, log_probs = sample_tokens(LOGITS[None], [params], [0.99])
    assert tokens == [1]
    assert log_probs[0] == pytest.approx(torch.log_softmax(LOGITS / 0.5, -1)[1].item())


def test_the_same_seed_draws_the_same_numbers() -> None:
    assert draw_uniforms(3, 5) == draw_uniforms(3, 9)[:5] != draw_uniforms(4, 5)
