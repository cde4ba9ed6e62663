"""One PPO update from samples of chains is the one from a sample per turn, in float64."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.trainer.ppo import PpoTrainer
from tests.embedded.conftest import DIS, KL_LOSS, trainer_args
from tests.fixtures.conversations import by_turn, conversations, train_data

TURNS, STEP = 16, 4
KL_IN_REWARD = {"kl_coef": 0.1, "value_first_token_weight": 3.0}


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "flags", [KL_IN_REWARD, KL_LOSS, DIS], ids=["kl in reward", "kl loss", "dis"]
)
@pytest.mark.usefixtures("in_float64")
def test_an_update_is_that_of_a_sample_per_turn(policy_folder: Path, flags: dict[str, Any]) -> None:
    segments, groups = conversations(random.Random(5), 3, TURNS)
    sizes = {"rollout_batch_size": TURNS, "global_batch_size": STEP}
    args = trainer_args(hf_checkpoint=str(policy_folder), **sizes, **flags)
    found = []
    for chains in (False, True):
        data = train_data(args, segments, groups, [k % 3 for k in range(TURNS)], chains=chains)
        found.append((sum(map(len, data["tokens"])), *_update(PpoTrainer(args), data)))
    (tokens, turns, metrics, gradients), (fewer, joined, same_metrics, same_gradients) = found
    assert fewer < 0.7 * tokens
    for key, numbers in turns.items():
        assert numbers == pytest.approx(joined[key], abs=1e-9), key
    assert metrics == pytest.approx(same_metrics, abs=1e-9)
    for role, steps in gradients.items():
        assert len(steps) == TURNS // STEP and all(step.abs().max() > 1e-6 for step in steps)
        torch.testing.assert_close(steps, same_gradients[role], atol=1e-9, rtol=1e-9)


def _update(
    trainer: PpoTrainer, data: dict[str, Any]
) -> tuple[Any, dict[str, float], dict[str, list[torch.Tensor]]]:
    """What each token of a turn got, the metrics, and each role's gradients."""
    gradients: dict[str, list[torch.Tensor]] = {"actor": [], "critic": []}
    for role, steps in gradients.items():
        _record(getattr(trainer, f"{role}_optimizer"), getattr(trainer, role), steps)
    for seed, model in enumerate((trainer.actor, trainer.critic, trainer.reference)):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.double().parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    metrics = trainer.train(0, data)
    assert trainer.trained is not None and trainer.trained[0] == "actor"
    trained = trainer.trained[1]
    turns = {
        (key, turn): numbers
        for key in ("values", "log_probs", "advantages", "returns")
        for turn, numbers in by_turn(data, trained[key]).items()
    }
    return turns, metrics, gradients


def _record(optimizer: Any, model: torch.nn.Module, steps: list[torch.Tensor]) -> None:
    step = optimizer.step

    def recorded() -> Any:
        steps.append(
            torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])
        )
        return step()

    optimizer.step = recorded
