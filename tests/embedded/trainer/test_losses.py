"""What a KL loss does to the policy: mean gradients over all tokens of a small vocabulary, computed
exactly."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from embedded.arguments import EmbeddedFlags
from embedded.run.alarms import warnings_of_plan
from embedded.trainer.losses import approx_kl
from slime_verlog import ConfigError, read_settings
from tests.fixtures.checkouts import CHECKOUTS, checkout_or_skip

Estimator = Callable[..., Tensor]
KINDS = ("k1", "k2", "k3", "low_var_kl")


def mean_gradient(estimate: Estimator, reference: Tensor, kind: str, logits: Tensor) -> Tensor:
    """Average the loss's gradient over the tokens that the policy itself samples."""
    total = torch.zeros_like(logits)
    for token, probability in enumerate(torch.softmax(logits, -1)):
        wanted = logits.clone().requires_grad_()
        log_prob = torch.log_softmax(wanted, -1)[token]
        (gradient,) = torch.autograd.grad(
            estimate(log_prob[None], reference[token][None], kind).sum(), wanted
        )
        total += probability * gradient
    return total


def gradient_of_kl(logits: Tensor, reference: Tensor, *, forward: bool) -> Tensor:
    wanted = logits.clone().requires_grad_()
    policy = torch.log_softmax(wanted, -1)
    kl = reference.exp() * (reference - policy) if forward else policy.exp() * (policy - reference)
    (gradient,) = torch.autograd.grad(kl.sum(), wanted)
    return gradient


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, one, other = torch.randn(3, 6, dtype=torch.double, generator=generator)
    return logits, torch.log_softmax(one, -1), torch.log_softmax(other, -1)


def estimator_of(whose: str) -> Estimator:
    """Ours, or that of a slime checkout."""
    if whose == "ours":
        return approx_kl
    path = checkout_or_skip(whose) / "slime" / "utils" / "ppo_utils.py"
    spec = importlib.util.spec_from_file_location("ppo_utils", path)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_approx_kl


@pytest.mark.parametrize("whose", ["ours", *CHECKOUTS])
def test_a_kl_loss_pulls_towards_the_reference_with_every_estimator_but_k1(whose: str) -> None:
    estimate = estimator_of(whose)
    logits, reference, other = distributions()
    found = {kind: mean_gradient(estimate, reference, kind, logits) for kind in KINDS}
    close = lambda a, b: torch.allclose(a, b, atol=1e-6)
    assert close(found["k1"], torch.zeros_like(logits))
    assert close(mean_gradient(estimate, other, "k1", logits), found["k1"])
    assert close(found["k2"], gradient_of_kl(logits, reference, forward=False))
    assert close(found["k3"], gradient_of_kl(logits, reference, forward=True))
    assert close(found["low_var_kl"], found["k3"])


def flags(**given: Any) -> EmbeddedFlags:
    return read_settings(
        EmbeddedFlags, {"hf_checkpoint": "", "num_rollout": 40, "kl_coef": 0.0, **given}
    )


def test_k1_is_refused_in_a_loss_and_welcome_in_the_reward() -> None:
    with pytest.raises(ConfigError, match="give --kl-loss-type low_var_kl, k2 or k3"):
        flags(use_kl_loss=True, kl_loss_coef=0.01)
    for kind in KINDS[1:]:
        flags(use_kl_loss=True, kl_loss_coef=0.01, kl_loss_type=kind)
    flags(kl_coef=0.001, kl_loss_type="k1")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"use_kl_loss": True}, "--kl-loss-coef 0 (the default) only logs the KL"),
        (
            {"use_kl_loss": True, "kl_loss_type": "k2"},
            "give --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var",
        ),
        (
            {"kl_loss_coef": 0.01, "kl_loss_type": "k2"},
            "--kl-loss-coef 0.01 has no effect without --use-kl-loss",
        ),
        ({"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k2"}, None),
    ],
)
def test_a_kl_loss_that_charges_nothing_is_warned_about(
    given: dict[str, Any], words: str | None
) -> None:
    found = list(warnings_of_plan(flags(**given)))
    assert len(found) == (words is not None) and (words is None or words in found[0])
