"""A study's table and plot hold what its runs wrote."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")
pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")
pytest.importorskip("matplotlib", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.run.folder import claim
from embedded.studies.report import plot_by_length, table, table_lines
from embedded.studies.results import Run, read_runs
from embedded.studies.study import Plan, Study, Variant, left_to_do
from rollout.errors import ConfigError
from slime_verlog import read_settings


def test_the_table_counts_finished_runs_alone_and_says_how_far_seeds_differ(tmp_path: Path) -> None:
    study = Study(question="Which?", variants={"a": Variant(), "b": Variant()})

    def run(variant: str, seed: int, after: float, done: bool = True) -> Run:
        evals = [
            {"update": k, "turns": 0, "eval/success": s, "eval/turns": 5}
            for k, s in ((0, 0.5), (9, after))
        ]
        frozen = {"update": 1, "turns": 256, "critic/value_loss": 99.0, "train/actor_trains": 0.0}
        trained = {"update": 2, "turns": 512, "critic/value_loss": 2.0, "train/actor_trains": 1.0}
        return Run(variant, seed, [evals[0], frozen, trained, evals[1]], done)

    # A quarter of the seeds is left out at each end, so 0.1 does not count.
    ends = enumerate((0.1, 0.6, 0.7, 0.8))
    text = table(study, [*(run("a", *end) for end in ends), run("b", 0, 0.9, done=False)])
    assert re.search(r"\| a \| 4 \| 0.500 ± 0.000 \| 0.650 \[0\.[123]\d\d, 0\.[78]\d\d\] \| ", text)
    assert " | 5.0 ± 0.0 | 2.0000 ± 0.0000 | - |" in text
    assert "| b | 0 | - |" in text and "Not finished, and not counted: b seed 0." in text
    assert read_runs(tmp_path, study) == []


def test_the_tasks_of_a_sweep_are_in_the_table() -> None:
    study = Study(question="Which?", variants={"a": Variant()})
    rates = {"eval/goto/num_dists=0/success": 0.75, "eval/goto/num_dists=3/success": 0.25}
    rows = [
        {"turns": 0.0, "eval/success": 0.5, "eval/turns": 9.0, "eval/episodes": 4.0, **rates}
    ] * 2
    text = "\n".join(table_lines(study, [Run("a", 0, rows, True)]))
    assert "| win rate after, by held-out task | goto/num_dists=0 | goto/num_dists=3 |" in text
    assert "| a | 0.750 | 0.250 |" in text


@pytest.mark.parametrize(("kept", "update"), [(0, 0), (3, 2)])
def test_a_finished_run_that_lost_rows_is_refused(tmp_path: Path, kept: int, update: int) -> None:
    study = Study(question="Which?", variants={"v": Variant()})
    folder = tmp_path / "v" / "seed_0"
    folder.mkdir(parents=True)
    before, after = ({"update": n, "eval/episodes": 8.0} for n in (0, 2))
    rows = [before, *({"update": n, "train/actor_trains": 1.0} for n in (1, 2)), after]
    write = lambda lines: (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in lines)
    )
    (folder / "done.json").write_text('{"updates": 2, "turns": 16.0}')
    write(rows)
    assert [run.done for run in read_runs(tmp_path, study)] == [True]
    write(rows[:kept])
    with pytest.raises(
        ConfigError, match=rf"rows.jsonl ends at update {update} of .*: delete .*seed_0 and"
    ):
        read_runs(tmp_path, study)


def test_folders_beside_the_runs_are_no_runs(tmp_path: Path) -> None:
    for name, update in (("seed_0", 5), ("seed_0_old", 1), ("seed_backup", 2), ("seed_00", 3)):
        (tmp_path / "v" / name).mkdir(parents=True)
        (tmp_path / "v" / name / "rows.jsonl").write_text(f'{{"update": {update}}}\n')
    (run,) = read_runs(tmp_path, Study(question="Which?", variants={"v": Variant()}))
    assert (run.seed, run.rows) == (0, [{"update": 5}])


def test_runs_outside_of_the_plan_must_have_its_settings_too(
    small: dict[str, Any], tmp_path: Path
) -> None:
    study = read_settings(Study, {**small, "variants": {"v": {}, "w": {}}})
    for variant in ("v", "w"):
        folder = Plan(study, tmp_path, (variant,)).run_folder(variant, 0)
        folder.mkdir(parents=True)
        claim(folder, Plan(study, tmp_path, (variant,)).settings(variant, 0))
    more = study.model_copy(update={"seeds": (1,)})
    assert left_to_do(Plan(more, tmp_path, ("v",))) == [("v", 1)]
    with pytest.raises(
        ConfigError, match=r"seed_0 holds a run with other settings: flags.num_rollout is 2 there"
    ):
        left_to_do(Plan(more.model_copy(update={"updates": 9}), tmp_path, ("v",)))


def test_a_plot_by_length_shows_each_method_over_the_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, dpi: figures.append(figure)
    )
    seeds = {"new_25": 4, "new_100": 2, "new_400": 4, "old_25": 1, "old_400": 5, "never_100": 0}
    study = Study(question="Which?", variants={name: Variant() for name in seeds})
    runs = []
    for variant, count in seeds.items():
        for seed in range(count):
            rows = [
                {"turns": turns, "eval/success": 0.002 * (seed + 1) * turns}
                for turns in (0.0, 100.0)
            ]
            runs.append(Run(variant, seed, rows, True))
    plot_by_length(tmp_path / "plot.png", study, runs)
    over_length, *axes = figures[0].axes
    assert [axis.get_title() for axis in axes] == [
        f"{length} turns per episode" for length in (25, 100, 400)
    ]
    new, old = over_length.containers
    assert (
        list(new.lines[0].get_ydata()) == pytest.approx([0.25, 0.15, 0.25])
        and len(old.lines[0].get_ydata()) == 2
    )
