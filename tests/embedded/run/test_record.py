"""The sample of training turns: which are recorded, with which numbers, and that they add up."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from transformers.models.auto.tokenization_auto import AutoTokenizer

from advantage.settings import advantage_settings
from embedded.run.record import TURNS, TrainingRecord, actor_fault
from embedded.train import train
from embedded.warmstart.policy import build_policy, save_policy, train_tokenizer
from inspection.records import read_episodes
from rollout.play.notes import SUMMARY_REQUEST
from tests.embedded.conftest import SIZE, TEXTS, sharpen
from tests.embedded.test_train import Recorder, maker


def recorded(
    policy: Path, folder: Path, keys: Any, tracker: Recorder | None = None, **flags: Any
) -> list[dict[str, Any]]:
    """The lines of a run of three updates of 24 turns; the first trains the critic alone."""
    args = maker(policy, folder)(keys, **{"rollout_batch_size": 24, **flags})
    path = folder / "training.jsonl"
    record = TrainingRecord(
        path, AutoTokenizer.from_pretrained(policy), advantage_settings(args), args.kl_coef
    )
    train(args, tracker or Recorder(), record=record)
    return list(read_episodes(path))


@pytest.mark.slow
def test_advantages_follow_from_what_is_recorded(policy_folder: Path, tmp_path: Path) -> None:
    discounts = {"gamma_step": 0.9, "lambda_step": 0.8, "gamma_token": 0.95, "lambda_token": 0.7}
    lines = recorded(policy_folder, tmp_path, discounts)
    assert next(line["credit"]["role"] for line in lines if line["update"] == 1) == "critic"
    assert {line["credit"]["role"] for line in lines if line["update"] > 1} == {"actor"}
    for update in (1, 2, 3):
        turns = sum(line["turns"] for line in lines if line["update"] == update)
        assert TURNS <= turns < 24 + TURNS
    for line in lines:
        credit, advantage = line["credit"], 0.0
        following = 0.0 if line["stop"] == "terminated" else credit["next_value"] or 0.0
        for turn in reversed(line["story"]):
            tokens = turn["tokens"]
            assert len(tokens["text"]) == len(tokens["values"])
            for j in reversed(range(len(tokens["text"]))):
                is_last = j == len(tokens["text"]) - 1
                gamma = credit["gamma_step" if is_last else "gamma_token"]
                decay = gamma * credit["lambda_step" if is_last else "lambda_token"]
                kl = credit["kl_coef"] * tokens["kl"][j] if credit["kl_coef"] else 0.0
                delta = (
                    (turn["reward"] if is_last else 0.0)
                    - kl
                    + gamma * following
                    - tokens["values"][j]
                )
                advantage, following = delta + decay * advantage, tokens["values"][j]
                assert tokens["returns"][j] - tokens["values"][j] == pytest.approx(
                    advantage, abs=2e-3
                )


def test_turns_of_notes_are_recorded_with_the_notes_and_measured(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, ["Current Observation:\n", SUMMARY_REQUEST.format(6)])
    save_policy(sharpen(build_policy(tokenizer, SIZE, seed=1)), tokenizer, tmp_path / "policy")
    memory = {"kind": "notes", "every": 2, "keep": 0, "max_tokens": 6}
    tracker = Recorder()
    lines = recorded(tmp_path / "policy", tmp_path, {"memory": memory}, tracker)
    turns = [turn for line in lines for turn in line["story"]]
    notes = [turn for turn in turns if "summary" in turn]
    assert notes and all(
        turn["moves"] is False and turn["summary"]["tokens"] <= 6 for turn in notes
    )
    assert any(turn["notes"] == turn["response"].strip() != "" for turn in notes)
    assert not [
        turn for turn in turns if "summary" not in turn and ("moves" in turn or "notes" in turn)
    ]
    (first, *others) = [metrics for _, metrics in tracker.updates]
    assert "rollout/summary_optimism" not in first, "the actor did not train"
    assert all("rollout/summary_optimism" in metrics for metrics in others)


def test_an_estimator_without_a_critic_records_what_there_is(
    policy_folder: Path, tmp_path: Path
) -> None:
    line, *_ = recorded(
        policy_folder,
        tmp_path,
        {"history": "window"},
        advantage_estimator="grpo",
        custom_advantage_function_path="advantage.group.compute_advantages",
        rollout_function_path="embedded.whole_episodes.generate_turns",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        global_batch_size=1,
        lr_decay_style="constant",
        num_rollout=1,
        num_critic_only_steps=6,  # means nothing without a critic, as in slime
        kl_coef=0.0,
        normalize_advantages=False,
    )
    assert "values" not in line["story"][0]["tokens"] and "advantages" in line["story"][0]["tokens"]


@pytest.mark.parametrize(("size", "fault"), [(0.5, None), (0.0, "every advantage was 0 in all 1")])
def test_centred_advantages_teach_something_though_their_mean_is_0(
    size: float, fault: str | None
) -> None:
    row = {"actor/grad_norm": 0.4, "actor/pg_loss": 0.0, "actor/advantage_abs": size}
    found = actor_fault([{**row, "train/actor_trains": 1.0}])
    assert found is fault if fault is None else fault in (found or "")
