"""Ablations: every variant runs, a second start repeats nothing, and the report holds what the runs
wrote."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")
pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")
pytest.importorskip("matplotlib", reason="needs pip install 'slime-verlog[embedded]'")

from safetensors.torch import load_file

import embedded.studies.run as ablation
import embedded.trainer.ppo
from embedded.run.record import MetricsLog, read_rows
from embedded.studies.run import Plan, main, make_plan, run_one, run_study
from embedded.studies.study import PLAYED, Study, check_study, load_study, run_settings, study_names
from rollout.bridge.settings import RolloutSettings, check_keys
from rollout.tasks import try_each_task
from slime_verlog import ConfigError, read_settings
from tests.cases import some
from tests.fixtures.warm_python import CONTEXT

ROOT = Path(__file__).parents[3]
WEIGHTS = "model.safetensors"


def tiny(small: dict[str, Any], **fields: Any) -> Study:
    return read_settings(Study, {**small, **fields})


def plan(study: Study, out: Path, **given: Any) -> Plan:
    return Plan(study, out, tuple(study.variants), **given)


TRIED: dict[str, list[str]] = {}
"""What trying the tasks of some settings said: several studies play the same ones."""


def try_once(settings: RolloutSettings) -> list[str]:
    played = repr([getattr(settings, field) for field in PLAYED])
    if played not in TRIED:
        TRIED[played] = try_each_task(settings)
    return TRIED[played]


QUICK = ("dual_discount", "critic_head_errands")
"""Studies that the default suite checks: of the shipped quickstart, and of another environment."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in study_names()],
)
def test_every_study_of_the_package_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rollout.tasks.try_each_task", try_once)
    study = load_study(name)
    check_study(study)
    for variant in study.variants:
        given = run_settings(study, variant, 0)
        warmup = check_keys(given["keys"]).critic_warmup
        replayed = warmup.w_epoch + warmup.w_iter
        assert not replayed or given["flags"]["num_critic_only_steps"] == replayed


def test_a_study_in_a_file_runs_reports_and_is_not_run_again(
    small: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, path = tmp_path / "out", tmp_path / "mine.yaml"
    del small["name"]
    variants = {"dual": None, "all_ones": {"keys": {"gamma_step": 1.0, "lambda_step": 1.0}}}
    path.write_text(yaml.safe_dump({**small, "variants": variants}, sort_keys=False))
    command = [str(path), "--out", str(out), "--seeds", "0", "1", "--jobs", "1"]
    main([*command, "--keep-policies"])
    text = capsys.readouterr().out
    assert "| dual | 2 | " in text and "| all_ones | 2 | " in text
    folder = out / "mine"
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG") and (
        folder / "table.md"
    ).read_text() in text
    runs = {(v, s) for v in ("dual", "all_ones") for s in "01"}
    with open(folder / "raw.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["variant"], row["seed"]) for row in rows} == runs
    assert all(row["finished"] == "True" for row in rows)
    for variant in ("dual", "all_ones"):
        mine = [row for row in rows if (row["variant"], row["seed"]) == (variant, "0")]
        assert [row["update"] for row in mine if row["eval/success"]] == ["0", "1", "2"]
        assert [row["turns"] for row in mine if row["critic/value_loss"]] == ["8", "16"]
        seconds = [float(row["seconds"]) for row in mine if row["eval/success"]]
        assert seconds[0] == 0 < seconds[1] < seconds[2]
        before, after = (
            load_file(folder / variant / "seed_0" / f"policy_{n}" / WEIGHTS)
            for n in ("before", "after")
        )
        assert before.keys() == after.keys() and any(
            (before[key] != after[key]).any() for key in before
        )
    # Both variants started from the same policy, and a second start trains nothing.
    assert len(list((out / "policies").iterdir())) == 2
    monkeypatch.setattr(
        "embedded.train.train", lambda *_: pytest.fail("a finished run was run again")
    )
    main(command)
    assert (folder / "table.md").read_text() in capsys.readouterr().out


@pytest.mark.slow
def test_runs_in_parallel_processes_give_the_same_rows(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedded.studies.run.multiprocessing.get_context", lambda method: CONTEXT)
    for jobs, seeds in {1: [0], 2: [0, 1]}.items():
        run_study(
            plan(tiny(small, updates=1, eval_interval=9, seeds=seeds), tmp_path / str(jobs)), jobs
        )
    folders = ("1/tiny/v/seed_0", "2/tiny/v/seed_0", "2/tiny/v/seed_1")
    alone, beside, other = (read_rows(tmp_path / folder / "rows.jsonl") for folder in folders)
    assert all([row["update"] for row in rows] == [0, 1, 1] for rows in (alone, beside, other))
    assert alone[0] == beside[0]


@pytest.mark.parametrize("method", some(["update", "evaluation"], ["update"]))
def test_an_interrupted_run_goes_on_from_its_checkpoint_and_writes_every_row_once(
    method: str, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedded.studies.study.SAVE_INTERVAL", 1)
    work = plan(tiny(small, updates=3), tmp_path)
    folder = work.run_folder("v", 0)
    original = getattr(MetricsLog, method)

    def fail(self: MetricsLog, number: int, *values: Any) -> Any:
        """After an update's row was written, or before that of an evaluation."""
        if (method, number) == ("evaluation", 2):
            raise KeyboardInterrupt
        result = original(self, number, *values)
        if (method, number) == ("update", 1):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(MetricsLog, method, fail)
    with pytest.raises(KeyboardInterrupt):
        run_one(work, "v", 0)
    assert not (folder / "done.json").exists()
    monkeypatch.setattr(MetricsLog, method, original)
    run_one(work, "v", 0)
    rows = read_rows(folder / "rows.jsonl")
    assert [row["update"] for row in rows if "rollout/turns" in row] == [1, 2, 3]
    assert [row["update"] for row in rows if "eval/success" in row] == [0, 1, 2, 3]
    assert [row["turns"] for row in rows if "rollout/turns" in row] == [8, 16, 24]
    assert json.loads((folder / "done.json").read_text()) == {"updates": 3, "turns": 24.0}
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
def test_runs_in_a_committed_raw_csv_are_kept_and_not_repeated(
    small: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first machine is lost after seed 0; the second has its `raw.csv` and `variants.json`, and
    no run folder."""
    path, played = tmp_path / "tiny.yaml", list[int]()
    study: dict[str, Any] = {**small, "seeds": [0, 1]}
    path.write_text(yaml.safe_dump(study))

    def play(given: Plan, variant: str, seed: int) -> None:
        if played == [0]:
            raise KeyboardInterrupt
        played.append(seed)
        evaluated = {
            "seconds": 0.5,
            "eval/episodes": 4,
            "eval/success": 0.123456789,
            "eval/turns": 3,
        }
        rows = [{"update": update, "turns": 8 * update, **evaluated} for update in (0, 2)]
        folder = given.run_folder(variant, seed)
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "done.json").write_text('{"updates": 2}')

    def start(machine: str, *flags: str) -> None:
        main([str(path), "--out", str(tmp_path / machine), "--jobs", "1", *flags])

    monkeypatch.setattr(ablation, "run_one", play)
    with pytest.raises(SystemExit):
        start("first")
    first, second = tmp_path / "first" / "tiny", tmp_path / "second" / "tiny"
    lines = (first / "raw.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in lines[1:]] == [["v", "0", "True"]] * 2
    second.mkdir(parents=True)
    shutil.copy(first / "raw.csv", second)
    with pytest.raises(SystemExit, match="variants.json"):
        start("second")
    shutil.copy(first / "variants.json", second)
    start("second", "--dry-run")
    assert "seed_0/: 2 updates, finished" in capsys.readouterr().out
    played.clear()
    with pytest.raises(SystemExit):  # these rows have no update that trained the actor
        start("second")
    assert played == [1] and (second / "raw.csv").read_text().splitlines()[:3] == lines
    shutil.rmtree(second / "v")
    path.write_text(yaml.safe_dump({**study, "flags": {**study["flags"], "lr": 0.5}}))
    with pytest.raises(
        SystemExit, match="raw.csv holds a run with other settings: flags.lr is None there and 0.5"
    ):
        start("second")


@pytest.mark.slow
def test_turns_of_whole_episodes_can_be_training_groups_so_steps_are_equal_at_any_length(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two episodes of twelve turns in steps of eight turns; an episode alone would fill no step."""
    sizes: list[int] = []
    steps = embedded.trainer.ppo.optimizer_steps

    def watched(groups: list[int], per_step: int) -> list[list[int]]:
        made = steps(groups, per_step)
        sizes.extend(map(len, made))
        return made

    monkeypatch.setattr(embedded.trainer.ppo, "optimizer_steps", watched)
    keys = {
        **load_study("long_horizon").variant("rloo_25").keys,
        "tasks": ["errands"],
        "env": {"max_steps": 12},
    }
    shared = {**load_study("long_horizon").variant("rloo_25").flags, "rollout_batch_size": 1}
    flags = {**small["flags"], **shared, "n_samples_per_prompt": 2, "global_batch_size": 8}
    work = plan(tiny(small, updates=1, variants={"v": {"keys": keys, "flags": flags}}), tmp_path)
    run_one(work, "v", 0)
    (row,) = [
        row for row in read_rows(work.run_folder("v", 0) / "rows.jsonl") if "rollout/turns" in row
    ]
    assert row["rollout/turns"] == 24 and row["train/actor_trains"] == 1
    assert sizes == [8, 8, 8]


def test_variants_with_other_environments_share_a_policy_if_their_demonstrations_are_equal(
    small: dict[str, Any], tmp_path: Path
) -> None:
    errands = lambda turns: {"tasks": ["errands"], "env": {"max_steps": turns}}
    mood = {"chat_template_kwargs": {"mood": "chatty"}}
    variants = {
        "short": {"keys": errands(5)},
        "long": {"keys": errands(9)},
        "chatty": {"keys": {**errands(5), **mood}},
    }
    of_one = lambda warm: plan(
        tiny(small, variants=variants, warm={**small["warm"], **warm}), tmp_path
    )
    found = {}
    for name, warm in {"same": {"env": {"max_steps": 7}}, "own": {}}.items():
        work = of_one(warm)
        for variant in variants:
            config, settings = tmp_path / f"{name}_{variant}.yaml", work.settings(variant, 0)
            config.write_text(yaml.safe_dump(settings["keys"]))
            found[name, variant] = ablation._policy(config, 0, tmp_path / "policies", settings)
    assert found["same", "short"] == found["same", "long"] != found["same", "chatty"]
    assert found["own", "short"] != found["own", "long"]


def test_a_run_whose_actor_never_trained_is_named(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "frozen.yaml"
    path.write_text(yaml.safe_dump({**small, "updates": 1}))
    with pytest.raises(SystemExit) as caught:
        main([str(path), "--out", str(tmp_path / "out")])
    assert caught.value.code == 1
    said = "Warning, v seed 0: the actor never trained: only the critic did, in all 1 updates"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"variant": {}}, "unknown key 'variant'; did you mean 'variants'?"),
        ({"variants": {}}, "variants is empty; name at least one"),
        ({"variants": {"a/b": {}}}, "'a/b' cannot be the name of a folder"),
        (
            {"seeds": [0, 0]},
            "seeds must be a list of different integers that are at least 0, got [0, 0]",
        ),
        ({"contrasts": {"c": {"w": 1}}}, "contrasts name 'w'"),
        (
            {"variants": {"a": {"keys": {"memry": {}}}}},
            "variant 'a': unknown key 'memry'; did you mean 'memory'?",
        ),
        (
            {"variants": {"a": {"flags": {"lrr": 1}}}},
            "variant 'a': unknown key 'lrr'; did you mean 'lr'?",
        ),
        (
            {"variants": {"a": {"warm": {"epoch": 1}}}},
            "variant 'a': unknown key 'warm.epoch'; did you mean",
        ),
    ],
    ids=str,
)
def test_a_mistake_in_a_study_ends_in_one_sentence(
    fields: dict[str, Any], sentence: str, small: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**small, **fields}))
    with pytest.raises(SystemExit) as caught:
        main([str(path), "--out", str(tmp_path / "out"), "--dry-run"])
    assert str(caught.value).startswith("error: ") and sentence in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no variant 'dule'; choose from dual, all_ones"):
        make_plan(load_study("dual_discount"), tmp_path, ["dule"])
    with pytest.raises(
        ConfigError,
        match="unknown study 'dual'; choose one of asynchronous, .*, or give a YAML file",
    ):
        load_study("dual")


def test_a_dry_run_lists_the_runs_with_warnings_and_writes_nothing(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "study.yaml", tmp_path / "out"
    variants = {"a": {}, "b": {"flags": {"num_rollout": 1}}}
    path.write_text(yaml.safe_dump({**small, "updates": 40, "variants": variants}))
    main([str(path), "--out", str(out), "--dry-run", "--seeds", "3"])
    question, first, second, warning = capsys.readouterr().out.splitlines()
    assert question == "Which?"
    assert first == f"  {out}/tiny/a/seed_3/: 40 updates, to do"
    assert second == f"  {out}/tiny/b/seed_3/: 1 updates, to do"
    assert warning.startswith(
        "warning: b: all 1 updates train the critic alone, so the policy cannot change"
    )
    assert not out.exists()
