"""Value pretraining inside slime's own train.py, and PPO that starts from the critic which it
saved."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from advantage.critic import MIN_GAIN
from advantage.turn_table import TurnKind
from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import Run, place_of
from tests.slime.expectation import Trained, trained_samples
from tests.slime.test_resume import checkpoint_flags

pytestmark = pytest.mark.slow

SEEDS = "slime_verlog_seeds.json"
BATCHES = 2
TURNS = 64
BINS = {"value_loss": "hl_gauss", "value_bins": 21, "value_range": [-3.0, 9.0]}
"""PPO's YAML says nothing about the head: it comes from the checkpoint."""
SETTINGS = {
    "batches": BATCHES,
    "held_out": 0.25,
    "passes": 6,
    "patience": 2,
    "least_explained_variance": None,
}
SAME_TURNS = f"--sglang-enable-deterministic-inference --rollout-batch-size {TURNS}"
"""Both runs play the same first batch, with the same weights and seeds."""


def start_flags(run: Run, critic: Path | None = None) -> list[str]:
    return checkpoint_flags(run, "5.0e-3" if "value_loss" in run.config else "1.0e-3", critic)


@pytest.fixture(scope="module")
def make(make_run: Callable[..., Run], engine: EngineServer, ground: Path) -> Callable[..., Run]:
    def experiment(name: str, rollouts: int, critic_only: int, gpus: int, **config: Any) -> Run:
        counts = f"--num-rollout {rollouts} --num-critic-only-steps {critic_only}"
        game = {"ledger": str(ground / name / "ledger"), "longest": 9, "steady": True}
        options = {"env": game, "turn_quota": "per_env", "n_env": 16, **config}
        return make_run(name, *engine_flags(engine), SAME_TURNS, counts, gpus=gpus, **options)

    return experiment


@pytest.fixture(scope="module", params=[{}, BINS], ids=["mse", "hl_gauss"])
def pretraining(make: Callable[..., Run], request: pytest.FixtureRequest) -> Run:
    name = f"pretraining{len(request.param)}"
    # The first passes move only the mean.
    longer = {"passes": 20, "patience": 12} if request.param else {}
    run = make(name, BATCHES, BATCHES, 2, value_pretraining={**SETTINGS, **longer}, **request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_DEDUP_LOGS", "0")  # lines that differ in a number alone would be left out
        run.train(start_flags(run))
    return run


@pytest.fixture(scope="module")
def ppo(make: Callable[..., Run], pretraining: Run) -> Run:
    # With the file of seeds, PPO would play turns whose values nothing recorded.
    critic = pretraining.work / "copy"
    shutil.copytree(pretraining.work / "critic", critic, ignore=shutil.ignore_patterns(SEEDS))
    run = make(
        f"ppo-{pretraining.work.name}",
        1,
        0,
        1,
        value_pretraining={"least_explained_variance": -100.0},
    )
    run.train(start_flags(run, critic))
    return run


def explained(run: Run) -> dict[int, float]:
    """Held-out explained variance by the number of passes before it."""
    log = run.log.read_text(errors="replace")
    found = re.findall(r"after (\d+) passes, held-out explained variance (-?[\d.]+)", log)
    return {int(passes): float(value) for passes, value in found}


def passes(run: Run) -> int:
    """The pass whose weights were saved."""
    log = run.log.read_text(errors="replace")
    return int(
        re.findall(r"held-out explained variance -?[\d.]+ after (\d+) of \d+ passes", log)[0]
    )


def trained(run: Run, rollout: int, samples: int) -> list[Trained]:
    return trained_samples(run.records("critic", rollout), run.samples(samples))


def test_no_episode_is_on_both_sides_and_the_held_out_ones_are_not_trained_on(
    pretraining: Run,
) -> None:
    sides: dict[bool, set[int]] = {True: set(), False: set()}
    items = trained(pretraining, BATCHES - 1, BATCHES - 1)
    assert sum(not item.is_bootstrap for item in items) == BATCHES * TURNS
    for item in items:
        if not item.is_bootstrap:
            held_out = item.sample["train_metadata"]["turn_row"].kind == TurnKind.HELD_OUT
            sides[held_out].add(item.sample["metadata"]["episode_id"])
            assert bool(item.row["loss_masks"].any()) != held_out
    assert sides[True] and sides[False] and not sides[True] & sides[False]


def test_explained_variance_is_that_of_the_held_out_turns_and_the_best_pass_is_saved(
    pretraining: Run,
) -> None:
    measured, best = explained(pretraining), passes(pretraining)
    assert sorted(measured) == list(range(len(measured)))
    for number in range(len(measured) - 1):
        # Nothing trains after the last measurement, so nothing records it.
        items = trained(pretraining, BATCHES - 1 + number, BATCHES - 1)
        held_out = [
            item.row for item in items if not item.is_bootstrap and not item.row["loss_masks"].any()
        ]
        values, returns = (
            torch.cat([row[name] for row in held_out]).double() for name in ("values", "returns")
        )
        wanted = 1 - (returns - values).var() / returns.var()
        assert measured[number] == pytest.approx(float(wanted), abs=1e-3)
    assert measured[best] >= max(measured.values()) - MIN_GAIN
    settings = pretraining.config["value_pretraining"]
    assert len(measured) - 1 in (best + settings["patience"], settings["passes"])
    assert not pretraining.records("critic", 0), "the critic trained while turns were collected"


def test_the_seeds_that_ppo_must_not_play_are_noted(pretraining: Run) -> None:
    used = json.loads((pretraining.work / "critic" / SEEDS).read_text())
    episodes = {
        sample["metadata"]["episode_id"]
        for k in range(BATCHES)
        for sample in pretraining.samples(k)
    }
    assert (
        used["first"] == min(episodes) == 0 and max(episodes) < used["next"] <= max(episodes) + 16
    )


def test_the_first_values_of_ppo_are_those_of_the_pretrained_critic(
    pretraining: Run, ppo: Run
) -> None:
    """The values before pass k + 1 are those after pass k, which was saved."""
    best = passes(pretraining)
    saved = {
        key_of(item): item.row["values"]
        for item in trained(pretraining, BATCHES - 1 + best, BATCHES - 1)
    }
    fresh = {
        key_of(item): item.row["values"] for item in trained(pretraining, BATCHES - 1, BATCHES - 1)
    }
    items = [item for item in trained(ppo, 0, 0) if not item.is_bootstrap]
    assert len(items) == TURNS
    values = torch.cat([item.row["values"] for item in items])
    last, first = (torch.cat([old[key_of(item)] for item in items]) for old in (saved, fresh))
    print("largest difference", (values - last).abs().max())
    torch.testing.assert_close(values, last, rtol=1e-4, atol=1e-4)
    assert (values - first).abs().mean() > 0.01


def test_ppo_reads_what_the_critic_learned_and_how_much_it_explains(
    pretraining: Run, ppo: Run
) -> None:
    log = re.sub(r"\s+", " ", ppo.log.read_text(errors="replace"))
    found = re.findall(
        r"explains (-?[\d.]+) of the variance of held-out returns \(data ([0-9a-f]{16})\)", log
    )
    assert {score for score, _ in found} == {f"{explained(pretraining)[passes(pretraining)]:.4f}"}
    assert ("the critic's head is value_loss: hl_gauss, value_bins: 21" in log) == (
        "3" in pretraining.work.name
    )


def key_of(item: Trained) -> tuple[int, int, tuple[int, ...]]:
    return *place_of(item.sample), tuple(item.sample["tokens"])
