"""slime's own train.py, unchanged: critic warm-up, PPO steps, evaluation and weight updates over
two ranks.

One run, looked at from many sides: what the environments paid against what Megatron trained on.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from advantage.turn_table import PADDING_INDEX
from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags, learning_roles
from tests.slime.cpu.harness import Run, micro_batches, place_of
from tests.slime.expectation import (
    Trained,
    assert_trained_as_paid,
    critic_targets,
    expected_advantages,
    largest_difference,
    payments_of,
    positions,
    trained_samples,
    whitened,
)

pytestmark = pytest.mark.slow

ROLLOUTS = 4
WARMUP = {"w_epoch": 1, "w_iter": 1, "fraction": 0.5}
KL_COEF = 0.05


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run], engine: EngineServer, ground: Any) -> Run:
    """Rollout 0 is collected and kept, rollout 1 drawn from it, then the actor trains in rollouts 2
    and 3."""
    work = ground / "loop"
    experiment = make_run(
        "loop",
        *engine_flags(engine),
        f"--num-rollout {ROLLOUTS} --num-critic-only-steps 2 --normalize-advantages",
        f"--kl-coef {KL_COEF} --eval-interval 4 --eval-prompt-data held-out unused",
        *learning_roles(work),
        "--max-tokens-per-gpu 8",  # each sample fills a micro-batch
        gpus=2,
        critic_warmup=WARMUP,
    )
    experiment.train()
    return experiment


def trained(run: Run, role: str, rollout: int) -> list[Trained]:
    return trained_samples(run.records(role, rollout), run.samples(rollout))


@pytest.mark.parametrize("rollout", [2, 3])
def test_the_actors_advantages_are_those_of_what_the_environments_paid(
    run: Run, rollout: int, tokenizer: Any
) -> None:
    assert_trained_as_paid(run, "actor", rollout, tokenizer, whitens=True, kl_coef=KL_COEF)


def test_kl_from_the_reference_reaches_the_advantages_once_the_actor_has_moved(
    run: Run, tokenizer: Any
) -> None:
    items = trained(run, "actor", 3)
    paid = payments_of(items, run.payments(), tokenizer)
    assert max(float(item.row["kl"].abs().max()) for item in items) > 0.01
    without = whitened(expected_advantages(items, paid))
    assert largest_difference(items, "advantages", without) > 1e-3


@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_the_critics_targets_are_those_of_what_the_environments_paid(
    run: Run, rollout: int, tokenizer: Any
) -> None:
    items = trained(run, "critic", rollout)
    paid = payments_of(items, run.payments(), tokenizer)
    targets = critic_targets(items, expected_advantages(items, paid))
    assert largest_difference(items, "returns", targets) < 2e-5


@pytest.mark.parametrize(
    ("role", "rollout"), [("critic", 0), ("critic", 1), ("critic", 3), ("actor", 2), ("actor", 3)]
)
def test_only_positions_that_predict_a_trained_token_get_gradient(
    run: Run, role: str, rollout: int
) -> None:
    """A turn may be without gradient (both losses clip); prompts, padding and bootstrap samples
    must be."""
    reached = boots = 0
    for record in run.records(role, rollout):
        masks = record["data"]["loss_masks"]
        for batch, numbers in micro_batches(record):
            start = 0
            for tokens, number in zip(batch["tokens"], numbers, strict=True):
                gradient = batch["gradient"][start : start + len(tokens)]
                predicts = torch.cat(
                    [
                        torch.zeros(len(tokens) - len(masks[number]) - 1),
                        masks[number],
                        torch.zeros(1),
                    ]
                )
                assert not gradient[predicts == 0].any()
                reached += bool(gradient.any())
                is_padding = record["data"]["sample_indices"][number] == PADDING_INDEX
                boots += not masks[number].any() and not is_padding
                start += len(tokens)
            assert not batch["gradient"][start:].any()
    turns = len(run.turns(rollout))
    assert reached > turns / 2
    assert boots == len(run.samples(rollout)) - turns
    assert boots > 0 or rollout == 1


def test_the_first_token_of_each_turn_weighs_three_times_in_the_value_loss_alone(run: Run) -> None:
    for role, first in (("critic", 3.0), ("actor", 1.0)):
        record = run.records(role, 3)[0]
        masks = record["data"]["loss_masks"]
        for batch, numbers in micro_batches(record):
            for weights, number in zip(
                batch["weights"].split(batch["response_lengths"]), numbers, strict=True
            ):
                wanted = (
                    torch.tensor([first] + [1.0] * (len(weights) - 1))
                    * masks[number]
                    / len(weights)
                )
                torch.testing.assert_close(weights, wanted)


@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_turns_and_groups_add_up(run: Run, rollout: int) -> None:
    samples = run.samples(rollout)
    turns = run.turns(rollout)
    boots = [s for s in samples if s["metadata"]["kind"] == "bootstrap"]
    assert len(turns) == (8 if rollout == 1 else 16)
    groups = [group(s) for s in turns]
    assert len(set(groups)) == len(groups)
    assert {group(s) for s in boots} <= set(groups)
    earlier = {group(s) for r in range(rollout) for s in run.samples(r)}
    assert not earlier & set(groups)
    assert len(trained(run, "critic", rollout)) == len(samples)
    assert (len(run.records("actor", rollout)) == 2) == (rollout >= 2)


@pytest.mark.parametrize(
    ("role", "rollout"), [("critic", 0), ("critic", 1), ("actor", 2), ("actor", 3)]
)
def test_the_ranks_share_every_step_whatever_the_number_of_bootstrap_samples(
    run: Run, role: str, rollout: int
) -> None:
    records = [record["data"] for record in run.records(role, rollout)]
    first, second = (data["num_microbatches"] for data in records)
    assert first == second
    indices = [index for data in records for index in data["sample_indices"]]
    assert len(indices) == 2 * sum(first)
    assert len(indices) - indices.count(PADDING_INDEX) == len(run.samples(rollout))
    if role == "actor":
        lengths = [sample["response_length"] for sample in run.samples(rollout)]
        assert run.logged("rollout/response_lengths")[rollout - 2] == pytest.approx(
            sum(lengths) / len(lengths)
        )


def group(sample: dict[str, Any]) -> int:
    return sample["rollout_id"] if "rollout_id" in sample else sample["group_id"]


def test_both_ranks_share_episodes(run: Run) -> None:
    """Otherwise nothing would have shown that turns find their successors on other ranks."""
    split = 0
    for rollout in (0, 2, 3):
        samples = run.samples(rollout)
        own = [positions(record["data"], samples) for record in run.records("critic", rollout)]
        ranks = [{samples[p]["group_index"] for p in places if p < len(samples)} for places in own]
        split += len(ranks[0] & ranks[1])
    assert split > 0


def test_the_drawn_batch_repeats_kept_turns_with_the_values_of_the_moment(run: Run) -> None:
    kept, drawn = (
        {(*place_of(turn), tuple(turn["tokens"])) for turn in run.turns(rollout)}
        for rollout in (0, 1)
    )
    assert drawn <= kept
    before = {tuple(i.sample["tokens"]): i.row["values"] for i in trained(run, "critic", 0)}
    moved = [
        not torch.equal(before[tuple(i.sample["tokens"])], i.row["values"])
        for i in trained(run, "critic", 1)
        if not i.is_bootstrap
    ]
    assert all(moved)


def test_held_out_episodes_are_scored_by_what_they_were_paid(run: Run) -> None:
    samples = run.samples("eval_0")
    assert [s["metadata"]["seed"] for s in samples] == [1_000_000_000 + k for k in range(6)]
    told: dict[int, float] = {}
    for line in run.payments().values():
        if line["seed"] >= 1_000_000_000:
            told[line["seed"]] = told.get(line["seed"], 0.0) + line["reward"]
    # The second evaluation, after the last update, played the same seeds again.
    later = {s["metadata"]["seed"]: s["reward"] for s in run.samples("eval_3")}
    assert {
        s["metadata"]["seed"]: s["reward"] + later[s["metadata"]["seed"]] for s in samples
    } == told


def test_turn_metrics_reach_slimes_log(run: Run) -> None:
    log = run.log.read_text(errors="replace")
    line = next(line for line in log.splitlines() if re.search(r"perf 2: \{", line))
    for key in (
        "rollout/turns': 16.0",
        "turn/valid_action_ratio",
        "turn/reward",
        "rollout/engine_busy_share",
    ):
        assert key in line
    assert re.search(r"eval 0: \{.*eval/count/success_se", log)
