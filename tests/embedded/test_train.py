"""The whole loop on one machine: rollout hooks, engine and trainer, with a policy of a few thousand
weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from advantage.errors import NonFiniteLossError
from embedded.arguments import make_args
from embedded.train import train
from rollout.errors import ConfigError
from tests.embedded.conftest import OFF_POLICY

YAML = {
    "rollout_interaction_env_path": "tests.fixtures.counting_env",
    "tasks": ["count"],
    "env": {"max_length": 6},
    "eval": {"episodes": 3},
    "n_env": 4,
    # Which slot plays which turn must not depend on who is faster.
    "turn_quota": "per_env",
    "env_backend": "inline",
}


RLOO = {"group_estimator": "rloo"}


class Recorder:
    def __init__(self) -> None:
        self.updates: list[tuple[int, dict[str, float]]] = []
        self.evaluations: list[tuple[int, Any]] = []

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        self.updates.append((rollout_id, dict(metrics)))

    def evaluation(self, rollout_id: int, result: Any, weights: Any) -> None:
        self.evaluations.append((rollout_id, result))


@pytest.fixture
def make(policy_folder: Path, tmp_path: Path) -> Any:
    return maker(policy_folder, tmp_path)


def maker(policy_folder: Path, folder: Path) -> Any:
    """A function that makes the arguments of a run from keys and flags; its YAML is in `folder`."""
    path = folder / "run.yaml"

    def build(keys: Mapping[str, Any] | None = None, **flags: Any) -> Any:
        path.write_text(yaml.safe_dump({**YAML, **(keys or {})}))
        small = {
            "hf_checkpoint": str(policy_folder),
            "rollout_batch_size": 12,
            "global_batch_size": 4,
            "rollout_max_response_len": 6,
            "rollout_max_context_len": 256,
            "num_rollout": 3,
            "num_critic_only_steps": 1,
            "rollout_seed": 7,
        }
        return make_args(path, **{**small, **flags})

    return build


def test_a_run_trains_and_saves_before_each_evaluation_so_that_none_is_lost(
    make: Any, tmp_path: Path
) -> None:
    latest, saved = tmp_path / "run" / "latest.json", list[int]()

    class Watcher(Recorder):
        def evaluation(self, rollout_id: int, result: Any, weights: Any) -> None:
            super().evaluation(rollout_id, result, weights)
            saved.append(json.loads(latest.read_text())["rollout_id"] + 1 if latest.exists() else 0)

    recorder = Watcher()
    train(make(eval_interval=2, save_interval=9, save=str(latest.parent)), recorder)
    assert [number for number, _ in recorder.evaluations] == saved == [0, 2, 3]
    assert all(len(result.data["count"]["rewards"]) == 3 for _, result in recorder.evaluations)
    assert [number for number, _ in recorder.updates] == [0, 1, 2]
    for number, metrics in recorder.updates:
        assert metrics["rollout/turns"] == 12
        assert metrics["train/actor_trains"] == float(number >= 1)
        # All turns of a batch come from one version of the weights: the update before.
        assert metrics["turn/weight_versions"] == 1
        assert metrics["perf/rollout_s"] >= 0 and metrics["perf/train_s"] >= 0


def test_slots_play_on_while_the_trainer_works(make: Any) -> None:
    """Continuous batches with DIS and two critic passes: turns are at most one update old, and some
    are."""
    recorder = Recorder()
    keys = {"policy_loss": "dis", "critic_updates": 2, "turn_quota": "global"}
    path = "rollout.continuous.generate_rollout"
    train(
        make(keys, eval_interval=2, num_rollout=6, rollout_function_path=path, **OFF_POLICY),
        recorder,
    )
    assert [number for number, _ in recorder.updates] == list(range(6))
    stale = [metrics["turn/staleness_max"] for _, metrics in recorder.updates]
    assert max(stale) == 1.0 and all(
        metrics["rollout/turns"] == 12 for _, metrics in recorder.updates
    )
    assert all("actor/dis_ess" in metrics for _, metrics in recorder.updates[1:])


def test_one_policy_is_evaluated_alike_every_time(make: Any) -> None:
    runs = Recorder(), Recorder()
    for run in runs:
        train(make(num_rollout=1), run)
    first, second = (
        [
            (sample.reward, sample.metadata["story"])
            for sample in run.evaluations[0][1].data["count"]["samples"]
        ]
        for run in runs
    )
    assert first == second


@pytest.mark.parametrize(
    ("keys", "flags", "sentence"),
    [
        ({}, {"critic_rl": 1.0}, "unknown key 'critic_rl'; did you mean 'critic_lr'?"),
        (
            {},
            {"use_kl_loss": True, "kl_loss_coef": 0.1},
            "kl_coef 0.001 and use_kl_loss charge the same KL twice",
        ),
        (
            {},
            {"rollout_function_path": "embedded.whole_episodes.generate_turns"},
            "lr_decay_style linear is planned in episodes",
        ),
        ({}, {"advantage_estimator": "grpo"}, "--advantage-estimator grpo trains no critic"),
        (
            RLOO,
            {"kl_coef": 0.01},
            "--kl-coef 0.01: without a critic, charge KL with --use-kl-loss --kl-loss-coef",
        ),
    ],
    ids=str,
)
def test_a_wrong_flag_is_refused_in_the_words_of_the_yaml(
    make: Any, keys: dict[str, Any], flags: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(keys, **flags)
    assert str(caught.value).startswith(sentence)


def test_the_estimator_of_the_page_about_changes_can_be_used_as_printed(
    make: Any, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "change_one_thing.md").read_text()
    path = tmp_path / "my_estimators.py"
    path.write_text(page.split("```python\n")[2].split("```")[0])
    flags = {
        "rollout_batch_size": 2,
        "global_batch_size": 4,
        "custom_advantage_function_path": f"{path}:clipped",
    }
    recorder = Recorder()
    train(make(RLOO, num_rollout=1, **flags), recorder)
    assert recorder.updates[0][1]["train/actor_trains"] == 1


def test_cut_episodes_are_not_compared(make: Any) -> None:
    recorder = Recorder()
    with pytest.raises(
        ConfigError, match=r"embedded\.whole_episodes\.generate_rollout on one machine"
    ):
        train(make(RLOO, rollout_function_path="rollout.fixed_turn.generate_rollout"), recorder)
    assert recorder.updates == recorder.evaluations == []


RICH = """
from tests.fixtures import counting_env

class Rich(counting_env.CountingGame):
    def step(self, text):
        observation, done, info = super().step(text)
        return observation, done, {**info, "reward": 1e25 * (1 + info["reward"])}

def build_env(sample, args):
    settings = counting_env.read_env_settings(counting_env.CountingSettings, args)
    return Rich(settings, counting_env.describe_task(sample)[1])
"""


def test_an_infinite_loss_stops_the_run_before_it_is_trained_on(make: Any, tmp_path: Path) -> None:
    recorder, path = Recorder(), tmp_path / "rich.py"
    path.write_text(RICH)
    with pytest.raises(
        NonFiniteLossError,
        match="value_loss is inf in rollout 0, so training stops: scale the rewards",
    ):
        train(make({"rollout_interaction_env_path": str(path)}, num_rollout=3), recorder)
    assert recorder.updates == []
