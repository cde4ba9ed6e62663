"""Ablations: every variant runs, a second start repeats nothing, and the report holds what the runs wrote."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")
pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")
pytest.importorskip("matplotlib", reason="needs pip install 'slime-verlog[embedded]'")

import embedded.studies.run as ablation
from embedded.arguments import EmbeddedFlags
from embedded.studies.definitions import STUDIES, Study, Variant
from embedded.studies.report import Run, read_runs, table
from embedded.studies.run import CONFIG, Budget, RowTracker, main, merge, read_rows, run_one, run_study
from embedded.warmstart.imitation import WarmStart
from rollout.bridge.settings import load_settings
from slime_verlog import ConfigError, read_settings

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 64}


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    keys = yaml.safe_load((ROOT / CONFIG).read_text())
    keys["env"]["max_steps"], keys["n_env"] = 5, 4
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(keys))
    flags = {"rollout_batch_size": 8, "global_batch_size": 4, "rollout_max_response_len": 6}
    return Budget(
        config=str(path),
        updates=2,
        eval_episodes=2,
        eval_interval=1,
        flags={**flags, "num_critic_only_steps": 1},
        warm={"episodes": 2, "epochs": 1, "size": TINY},
    )


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_variant_names_only_keys_and_flags_that_exist(name: str, tmp_path: Path) -> None:
    shared = yaml.safe_load((ROOT / CONFIG).read_text())
    for variant in STUDIES[name].variants:
        read_settings(EmbeddedFlags, {"hf_checkpoint": "policy", **variant.flags})
        read_settings(WarmStart, variant.warm)
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(merge(shared, variant.keys)))
        config = load_settings(type("Args", (), {"custom_config_path": str(path)}))
        warmup = config.critic_warmup.w_epoch + config.critic_warmup.w_iter
        assert not warmup or variant.flags["num_critic_only_steps"] == warmup


def test_what_is_not_named_stays() -> None:
    below = {"memory": {"kind": "window", "n": 1}, "env": {"preset": "verlog"}, "n_env": 4}
    assert merge(below, {"memory": {"n": 4}, "n_env": 8}) == {
        "memory": {"kind": "window", "n": 4},
        "env": {"preset": "verlog"},
        "n_env": 8,
    }


def test_a_study_runs_reports_and_is_not_run_again(
    budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    text = run_study("dual_discount", [0, 1], out, budget)
    assert "| dual | 2 | " in text and "| all_ones | 2 | " in text
    folder = out / "dual_discount"
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG") and (folder / "table.md").read_text() in text
    with open(folder / "raw.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["variant"], row["seed"]) for row in rows} == {(v, s) for v in ("dual", "all_ones") for s in "01"}
    for variant in ("dual", "all_ones"):
        mine = [row for row in rows if (row["variant"], row["seed"]) == (variant, "0")]
        assert [row["update"] for row in mine if row["eval/success"]] == ["0", "1", "2"]
        assert [row["turns"] for row in mine if row["critic/value_loss"]] == ["8.0", "16.0"]
    # Both variants started from the same policy, and a second start trains nothing.
    assert len(list((out / "policies").iterdir())) == 2
    monkeypatch.setattr("embedded.train.train", lambda *_: pytest.fail("a finished run was run again"))
    assert run_study("dual_discount", [0, 1], out, budget) == text


def test_an_interrupted_run_goes_on_from_its_checkpoint_and_writes_every_row_once(
    budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "SAVE_INTERVAL", 1)
    budget = Budget(**{**vars(budget), "updates": 3})
    policies, folder = tmp_path / "policies", tmp_path / "run"
    policies.mkdir()
    update = RowTracker.update

    def fail_late(self: RowTracker, rollout_id: int, metrics: Any) -> None:
        update(self, rollout_id, metrics)
        if rollout_id == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowTracker, "update", fail_late)
    with pytest.raises(KeyboardInterrupt):
        run_one(Variant(name="v"), 0, folder, policies, budget)
    assert not (folder / "done.json").exists()
    monkeypatch.setattr(RowTracker, "update", update)
    run_one(Variant(name="v"), 0, folder, policies, budget)
    rows = read_rows(folder / "rows.jsonl")
    assert [row["update"] for row in rows if "rollout/turns" in row] == [1, 2, 3]
    assert [row["update"] for row in rows if "eval/success" in row] == [0, 1, 2, 3]
    assert [row["turns"] for row in rows if "rollout/turns" in row] == [8, 16, 24]
    assert json.loads((folder / "done.json").read_text()) == {"updates": 3, "turns": 24.0}
    assert not (folder / "checkpoints").exists()


def test_runs_of_other_settings_are_never_mixed(budget: Budget, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text(json.dumps({"keys": {}, "flags": {}, "warm": {}}))
    with pytest.raises(ConfigError, match="holds a run with other keys.*choose another --out"):
        run_one(Variant(name="v"), 0, tmp_path / "run", tmp_path, budget)


def test_two_shells_that_make_the_same_policy_both_go_on_with_it(
    budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = tmp_path / "policies"

    def slow(config: Any, temporary: Path, settings: WarmStart, seed: int) -> float:
        """Meanwhile the other shell is done."""
        for folder in (temporary, policies / temporary.name.strip(".").rpartition(".")[0]):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(folder.name)
        return 0.0

    monkeypatch.setattr("embedded.warmstart.imitation.make_policy", slow)
    settings = ablation._settings(Variant(name="v"), 0, budget)
    folder = ablation._policy(Path(budget.config), 0, policies, settings)
    assert (folder / "config.json").read_text() == folder.name
    assert list(policies.iterdir()) == [folder]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gigpo"])
def test_estimators_without_a_critic_train_on_whole_episodes(estimator: str, budget: Budget, tmp_path: Path) -> None:
    variant = next(v for v in STUDIES["estimator"].variants if v.name == estimator)
    variant = Variant(name=estimator, keys=variant.keys, flags={**variant.flags, "rollout_batch_size": 2})
    policies = tmp_path / "policies"
    policies.mkdir()
    run_one(variant, 0, tmp_path / "run", policies, Budget(**{**vars(budget), "updates": 1}))
    (row,) = [row for row in read_rows(tmp_path / "run" / "rows.jsonl") if "rollout/turns" in row]
    assert row["episode/finished"] == 8 and row["train/actor_trains"] == 1
    assert not any(key.startswith("critic/") for key in row)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_variant_of_every_study_trains(name: str, budget: Budget, tmp_path: Path) -> None:
    shared = {key: value for key, value in budget.flags.items() if key == "rollout_max_response_len"}
    budget = Budget(**{**vars(budget), "updates": 9, "eval_interval": 9, "flags": shared})
    text = run_study(name, [0], tmp_path, budget)
    for variant in STUDIES[name].variants:
        assert f"| {variant.name} | 1 | " in text
        rows = read_rows(tmp_path / name / variant.name / "seed_0" / "rows.jsonl")
        assert any(row.get("train/actor_trains") for row in rows) or variant.share < 1


def test_an_unknown_variant_is_named(budget: Budget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no variant 'dule'; choose from dual, all_ones"):
        run_study("dual_discount", [0], tmp_path, budget, ["dule"])
    with pytest.raises(ConfigError, match="unknown study 'dual'"):
        run_study("dual", [0], tmp_path, budget)


def test_the_table_counts_finished_runs_alone_and_gives_standard_errors_over_seeds(tmp_path: Path) -> None:
    study = Study(question="Which?", variants=(Variant(name="a"), Variant(name="b")))

    def run(variant: str, seed: int, after: float, done: bool = True) -> Run:
        evals = [{"update": k, "turns": 0, "eval/success": s, "eval/turns": 5} for k, s in ((0, 0.5), (9, after))]
        frozen = {"update": 1, "turns": 256, "critic/value_loss": 99.0, "train/actor_trains": 0.0}
        trained = {"update": 2, "turns": 512, "critic/value_loss": 2.0, "train/actor_trains": 1.0}
        return Run(variant, seed, [evals[0], frozen, trained, evals[1]], done)

    text = table(study, [run("a", 0, 0.6), run("a", 1, 0.8), run("b", 0, 0.9, done=False)])
    assert "| a | 2 | 0.500 ± 0.000 | 0.700 ± 0.100 | 5.0 ± 0.0 | 2.0000 ± 0.0000 | - |" in text
    assert "| b | 0 | - |" in text and "Not finished, and not counted: b seed 0." in text
    assert read_runs(tmp_path, study) == []


def test_the_command_line_knows_the_studies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])
    error = capsys.readouterr().err
    assert all(name in error for name in ("dual_discount", "memory", "fixed_turn", "warmup", "density", "estimator"))
