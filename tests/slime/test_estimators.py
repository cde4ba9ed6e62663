"""Estimators without a critic, and supervised training on scripted play, in slime's own
train.py."""

from collections import defaultdict
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest

from embedded.engine.server import EngineServer
from inspection.demonstrations import main as export
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import REPO, Run
from tests.slime.expectation import on_trained_tokens, trained_samples

pytestmark = pytest.mark.slow

GAMMA = 0.9
PATCH = ("custom_megatron_init_path",)
SFT = (
    "rollout_function_path",
    "data_source_path",
    "custom_convert_samples_to_train_data_path",
    *PATCH,
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)


RLOO = (
    "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout",
    "--custom-generate-function-path rollout.generate.generate",
    "--rollout-batch-size 4 --n-samples-per-prompt 3 --global-batch-size 6",
    "--advantage-estimator grpo",
    "--custom-advantage-function-path advantage.group.compute_advantages",
)


@pytest.fixture(scope="module")
def rloo(make_run: Callable[..., Run], engine: EngineServer) -> Run:
    """Four starts, each played three times, every turn a sample, spread over two ranks."""
    run = make_run(
        "rloo",
        *engine_flags(engine),
        # Each sample fills a micro-batch.
        *RLOO,
        "--num-rollout 2 --max-tokens-per-gpu 8",
        gpus=2,
        gamma_step=GAMMA,
        group_estimator="rloo",
    )
    run.train(without=PATCH)
    return run


@pytest.mark.parametrize("rollout", [0, 1])
def test_every_turn_is_trained_with_its_episodes_return_less_the_mean_of_its_siblings(
    rloo: Run, rollout: int
) -> None:
    items = trained_samples(rloo.records("actor", rollout), rloo.samples(rollout))
    episodes: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for item in items:
        episodes[item.sample["group_index"], item.sample["index"]].append(item)
    assert len(episodes) == 12 and len(items) > 12
    returns: dict[int, dict[int, float]] = defaultdict(dict)
    for (group, index), turns in episodes.items():
        assert [turn.turn for turn in turns] == list(range(len(turns)))
        returns[group][index] = sum(
            GAMMA**k * t.sample["metadata"]["reward"] for k, t in enumerate(turns)
        )
    found = set()
    for (group, index), turns in episodes.items():
        others = [value for other, value in returns[group].items() if other != index]
        wanted = returns[group][index] - mean(others)
        found.add(round(wanted, 6))
        for turn in turns:
            advantages = on_trained_tokens(turn, "advantages")
            assert len(advantages) and advantages.tolist() == pytest.approx(
                [wanted] * len(advantages), abs=1e-5
            )
    assert len(found) > 1, "all episodes of a group came out alike: nothing was tested"


def test_the_first_batch_after_a_resume_is_played_by_the_actor_and_not_by_the_reference(
    make_run: Callable[..., Run], engine: EngineServer
) -> None:
    kl = "--use-kl-loss --kl-loss-type k3 --kl-loss-coef 0.001"
    run = make_run("resumed", *engine_flags(engine), *RLOO, kl, group_estimator="rloo")
    folder = run.work / "actor"
    saved = f"--save {folder} --load {folder} --save-interval 1 --lr 1e-2"
    saved += " --override-opt-param-scheduler"
    run.train([saved, "--num-rollout 2"])
    run.train([saved, "--num-rollout 4"])
    gaps = run.logged("train/train_rollout_logprob_abs_diff")
    first_steps = gaps[:: len(gaps) // 4]
    assert len(first_steps) == 4 and max(first_steps) < 0.02, gaps
    assert run.logged("train/off_policy_alarms")
    reference, played = (run.logged(f"rollout/{name}_log_probs")[-1] for name in ("ref", "rollout"))
    assert reference != pytest.approx(played, abs=0.05), (
        "the actor is still the reference: nothing was tested"
    )
    process = run.start([saved, "--num-rollout 5"], without=PATCH)
    with pytest.raises(AssertionError, match="reference's weights"):
        run.finish(process, 600)


def test_supervised_training_takes_the_exported_demonstrations(
    make_run: Callable[..., Run],
) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    run = make_run(
        "sft",
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout",
        "--input-key messages",
        "--metadata-key metadata --loss-mask-type qwen --rollout-shuffle --num-epoch 2",
        "--rollout-batch-size 8 --global-batch-size 8 --max-tokens-per-gpu 4096",
        "--loss-type sft_loss --calculate-per-token-loss",
        "--disable-compute-advantages-and-returns",
        "--debug-train-only --advantage-estimator grpo --lr 3e-3",
    )
    rows = run.work / "rows.jsonl"
    config = REPO / "custom_configs" / "quickstart.yaml"
    export(f"--config {config} --episodes 8 --out {rows}".split())
    turns = len(rows.read_text().splitlines())
    run.train([f"--prompt-data {rows}"], without=SFT)
    losses = run.logged("train/loss")
    assert len(losses) == 2 * (turns // 8)
    assert losses[-1] < 0.9 * losses[0]
