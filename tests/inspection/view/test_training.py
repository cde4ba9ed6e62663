"""What the page knows of a run's training: metrics, alarms, settings; damaged files and slime's
events included."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from embedded.run.folder import claimed
from inspection.train import page_of
from inspection.view.training import expand_runs, read_training
from tests.fixtures.command import slime_verlog
from tests.fixtures.waiting import until
from tests.inspection.view.pages import head_of, write_rows


def training(run: Path) -> dict[str, Any]:
    found = read_training(run, run.name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("dual/seed_3", "dual"),
        ("lr-low-seed7", "lr-low"),
        ("seed_1", "mine"),
        ("seeded", "seeded"),
    ],
)
def test_runs_that_differ_in_their_seed_are_of_one_variant(
    tmp_path: Path, name: str, variant: str
) -> None:
    found = read_training(write_rows(tmp_path / "mine" / "run", [{"update": 1}]), name)
    assert found is not None and found["variant"] == variant


def test_a_half_written_row_waits_and_damaged_files_are_named(tmp_path: Path) -> None:
    run = write_rows(
        tmp_path,
        [{"update": 1, "actor/grad_norm": 1.0}, {"update": 2, "actor/grad_norm": float("nan")}],
    )
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"update": 3, "actor/gr')
    assert not [problem for problem in training(run)["problems"] if "damaged" in problem]
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("\n")
    (run / "summary.json").write_text("{")
    found = training(run)
    assert found["columns"]["update"] == [1, 2] and found["columns"]["actor/grad_norm"] == [1, None]
    problems = " ".join(found["problems"])
    for words in (
        "damaged after 2 updates",
        "grad_norm is not a finite number in update 2",
        "summary.json is cut",
    ):
        assert words in problems
    assert not found["healthy"]


def test_alarms_are_found_again_from_the_rows(tmp_path: Path) -> None:
    rows = [{"update": k, "actor/ref_kl": 0.4 * k, "train/actor_trains": 1.0} for k in range(1, 15)]
    (alarm,) = training(write_rows(tmp_path, rows))["alarms"]
    assert (alarm["metric"], alarm["update"]) == (
        "actor/ref_kl",
        10,
    ) and "healthy is 2 or less" in alarm["sentence"]


def test_the_state_is_what_the_run_recorded_or_whether_its_folder_is_claimed(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"keys": {}, "flags": {}}
    with claimed(tmp_path, settings):
        write_rows(tmp_path, [])
        (tmp_path / "about.json").write_text("{}")
        assert training(tmp_path)["state"] == "running"
        write_rows(tmp_path, [{"update": 1, "train/actor_trains": 1.0}])
        assert training(tmp_path)["healthy"]
    assert training(tmp_path)["state"] == "stopped: its process ended and left no reason"
    assert not training(tmp_path)["healthy"]
    (tmp_path / "about.json").write_text(json.dumps({"stopped": "the game broke"}))
    assert training(tmp_path)["state"] == "stopped: the game broke"
    (tmp_path / "about.json").unlink()
    (tmp_path / "done.json").write_text("{}")
    assert training(tmp_path)["state"] == "finished"


def test_settings_are_those_that_differ_from_the_defaults(tmp_path: Path) -> None:
    keys = {"memory": {"kind": "window", "n": 3}, "gamma_step": 0.99, "env": {"max_steps": 9}}
    run = write_rows(tmp_path, [{"update": 1}], keys=keys, flags={"lr": 1e-4, "eps_clip": 0.2})
    assert training(run)["settings"] == {
        "memory.n": [3, 1],
        "env.max_steps": [9, None],
        "lr": [1e-4, 3e-4],
    }


def write_events(folder: Path, steps: Sequence[int], *, ahead: int) -> None:
    """TensorBoard's events of a slime run whose rollout r is trained in `steps[r]` steps.

    Rollout r + `ahead` is logged before rollout r is trained.
    """
    from torch.utils.tensorboard import SummaryWriter

    with (
        SummaryWriter(str(folder / "rollout")) as board,
        SummaryWriter(str(folder / "actor")) as actor,
    ):
        for rollout, number in enumerate(steps):
            board.add_scalar("turn/reward", rollout, rollout, walltime=10 * (rollout - ahead))
            board.add_scalar(
                "eval/goto/success", rollout / 4, rollout, walltime=10 * (rollout - ahead)
            )
            for step in range(rollout * number, rollout * number + number):
                actor.add_scalar("train/ppo_kl", step / 10, step, walltime=10 * rollout + 5)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_of_slime_is_read_from_its_events(tmp_path: Path, ahead: int) -> None:
    pytest.importorskip("tensorboard", reason="slime's metrics are TensorBoard's")
    # With two draws of a warm-up.
    write_events(tmp_path / "tensorboard", [1, 1, 1, 1, 1, 1, 4, 4, 1], ahead=ahead)
    (tmp_path / "config.yaml").write_text("n_env: 7\n")
    found = training(tmp_path)
    columns = found["columns"]
    assert columns["update"] == list(range(10)) and columns["turn/reward"][1:] == list(range(9))
    assert columns["eval/goto/success"] == [0, None, *(k / 4 for k in range(1, 9))]
    assert columns["actor/ppo_kl"][1:] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 2.7, 3.1, 0.8]
    assert found["settings"]["n_env"][0] == 7


def test_a_folder_of_runs_is_expanded_and_told_apart(tmp_path: Path) -> None:
    for variant in ("a", "b"):
        write_rows(tmp_path / variant / "seed_0", [{"update": 1, "turn/reward": 1.0}])
    runs = expand_runs([tmp_path])
    write_rows(tmp_path / "a" / "seed_0" / "critic", [{"update": 1}])  # of value pretraining
    assert expand_runs([tmp_path]) == runs == expand_runs(runs)
    assert slime_verlog("view", tmp_path) == 0
    head = head_of(tmp_path / "episodes.html")
    assert [study["name"] for study in head["studies"]] == ["a/seed_0", "b/seed_0"] and head[
        "episodes"
    ] == []


def test_a_page_beside_a_training_is_finished_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_rows(tmp_path / "run", [{"update": 1, "turn/reward": 0.5}])
    page = tmp_path / "run" / "episodes.html"
    with page_of(run):
        until(page.exists)
        assert head_of(page)["follow"] > 0
        write_rows(run, [{"update": k, "turn/reward": 0.5} for k in (1, 2)])
    head = head_of(page)
    assert head["follow"] == 0 and head["studies"][0]["columns"]["update"] == [1, 2]
    assert str(page) in capsys.readouterr().out


def test_a_page_that_cannot_be_written_beside_a_training_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_rows(tmp_path / "run", [{"update": 1, "turn/reward": 0.5}])
    with page_of(run):
        until((tmp_path / "run" / "episodes.html").exists)
        (run / "training.jsonl").write_text('{"update": 1, "messages": [], "story": []}\n')
    assert "line 1, is not an episode: seed: Field required" in capfd.readouterr().err
