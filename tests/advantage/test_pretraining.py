"""Value pretraining through the hook that training calls: what is measured, what is hidden, and
when it stops."""

import random
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from advantage.critic import Progress
from advantage.errors import PretrainingError
from advantage.exchange import Group, Layout
from advantage.hook import compute_advantages
from advantage.settings import ValuePretrainingSettings, advantage_settings
from advantage.turn_table import TurnKind
from advantage.values import explained_share
from slime_verlog import ConfigError
from tests.advantage.batches import FakeSample, expected, make_args, make_samples, rollout_data


def collected(seed: int = 0) -> list[FakeSample]:
    """Two fifths of the segments are held out."""
    samples = make_samples(random.Random(seed), 20)
    segments = sorted({sample.row.segment for sample in samples})
    held_out = segments[::5] + segments[1::5]
    found = []
    for sample in samples:
        row = sample.row
        if row.segment in held_out and row.kind is TurnKind.TURN:
            row = replace(row, kind=TurnKind.HELD_OUT)
        found.append(replace(sample, row=row))
    return found


def pretraining_args(**settings: Any) -> Namespace:
    return make_args(kl_coef=0.0, value_pretraining={"batches": 3, **settings})


class Critic(torch.nn.Module):
    """Its values are the returns times its weight, but for the states after a cut, which stay as
    they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


def run(
    args: Namespace, weights: list[float], samples: list[FakeSample]
) -> tuple[Progress, Critic, list[Any]]:
    """Train as slime and the embedded trainer do: pass k gives the critic weight k. Returns what
    passes train on."""
    settings, critic, progress, trained = (
        advantage_settings(args).value_pretraining,
        Critic(),
        Progress(),
        [],
    )
    with_lambda_1 = Namespace(**{**vars(args), "lambda_step": 1.0, "lambda_token": 1.0})
    returns = [r.float() for _, r in expected(samples, with_lambda_1)]
    while True:
        data, weight = rollout_data(samples), critic.weight.item()
        for number, sample in enumerate(samples):
            if sample.row.turns:
                data["values"][number] = weight * returns[number]
        compute_advantages(args, data)
        if not progress.begin_pass(settings, data, [critic], Layout()):
            return progress, critic, trained
        with progress.held_out_hidden(data):
            trained.append(dict(data))
        critic.weight.data.fill_(weights[len(trained) - 1])


def test_explained_variance_is_that_of_the_held_out_tokens_and_the_best_pass_is_kept() -> None:
    args, samples = pretraining_args(patience=2), collected()
    progress, critic, _ = run(args, [0.5, 0.8, 0.7, 0.8, 1.0], samples)
    # With value = w x return, the error is (1 - w) x return.
    assert progress.explained == pytest.approx(
        [1 - (1 - w) ** 2 for w in (0.0, 0.5, 0.8, 0.7, 0.8)], abs=1e-4
    )
    assert progress.best == 2
    assert critic.weight.item() == pytest.approx(0.8)
    critic.weight.data.fill_(-1.0)
    progress.finish(advantage_settings(args).value_pretraining, [critic])
    assert critic.weight.item() == pytest.approx(0.8), "the weights of the best pass come back"


def test_a_pass_trains_on_all_other_turns_and_on_no_held_out_one() -> None:
    samples = collected()
    _, _, (data, *_) = run(pretraining_args(patience=1), [0.0], samples)
    for sample, mask in zip(samples, data["loss_masks"], strict=True):
        hidden = sample.row.kind is TurnKind.HELD_OUT
        assert mask.tolist() == ([0] * len(sample.mask) if hidden else sample.mask)


def test_the_number_of_passes_is_bounded() -> None:
    progress, _, trained = run(pretraining_args(passes=3), [0.1, 0.2, 0.3], collected())
    assert (len(trained), progress.best) == (3, 3)


def test_a_critic_that_explains_nothing_is_refused_unless_told_otherwise() -> None:
    args, samples = pretraining_args(patience=1), collected()
    progress, critic, _ = run(args, [-1.0], samples)
    settings = advantage_settings(args).value_pretraining
    with pytest.raises(
        PretrainingError, match="0.0000, not above value_pretraining.least_explained_variance 0"
    ):
        progress.finish(settings, [critic])
    progress, critic, _ = run(pretraining_args(patience=1), [-1.0], samples)
    progress.finish(settings.model_copy(update={"least_explained_variance": None}), [critic])


@pytest.mark.parametrize(
    ("variance", "unexplained", "share"),
    [(4.0, 1.0, 0.75), (4.0, 6.0, -0.5), (4.0, 4.0 - 1e-12, 0.0), (0.0, 0.0, 0.0), (0.0, 2.0, 0.0)],
)
def test_rounding_and_equal_returns_explain_nothing(
    variance: float, unexplained: float, share: float
) -> None:
    found = explained_share(variance, unexplained)
    assert found == pytest.approx(share, abs=1e-9)
    assert ValuePretrainingSettings().accepts(found) is (share > 0)


def test_the_last_pipeline_stage_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other stages have no values; they add zeros to what the last stage sends."""
    sent = torch.tensor([4.0, 0.0, 1.0, 0.0, 4.0], dtype=torch.float64)
    layout = Layout(pipeline=Group(rank=0, size=2), last_stage=False)
    monkeypatch.setattr(
        Group, "all_reduce", lambda self, x: x.add_(sent) if self.size > 1 else None
    )
    progress = Progress()
    assert progress.begin_pass(ValuePretrainingSettings(batches=1), {}, [Critic()], layout)
    assert progress.explained == [0.75]


def test_warm_up_and_pretraining_exclude_each_other() -> None:
    args = make_args(value_pretraining={"batches": 3}, critic_warmup={"w_epoch": 2})
    with pytest.raises(ConfigError, match="leave critic_warmup out"):
        advantage_settings(args)
