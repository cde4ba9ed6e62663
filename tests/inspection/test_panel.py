"""`slime-verlog panel`: the hash names the held-out episodes, and nothing else changes it."""

import io
import os
import random
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from embedded.studies.study import Study, Variant
from rollout.spec import EnvSpec, EpisodeSpec
from rollout.tasks import panel_hash
from tests.fixtures.command import error_of, slime_verlog
from tests.inspection.test_evaluate import evaluate, rows_of, write_config

ROOT = Path(__file__).parents[2]
ERRANDS = str(ROOT / "custom_configs" / "errands.yaml")
TASKS = ({"task": "one", "options": {"size": 3, "easy": True}}, {"task": "two", "weight": 2.0})
GAMES = ("blue", "green", "red")
NAMES = st.sampled_from(["goto", "open", "1", ""])
OPTIONS = st.dictionaries(
    NAMES, st.one_of(st.integers(0, 3), NAMES, st.lists(NAMES, max_size=2)), max_size=2
)
EPISODES = st.builds(
    lambda task, seed, options, turns: EpisodeSpec(
        0, task, EnvSpec("my_game", {"task": task, "seed": seed}, options, max_turns=turns)
    ),
    NAMES,
    st.integers(0, 3),
    OPTIONS,
    st.one_of(st.none(), st.integers(1, 3)),
)


def write_yaml(folder: Path, *, backwards: bool, workers: int) -> Path:
    """A game with data files, written in one order or the other; its folder is another one on each
    machine."""
    games = folder / "games"
    games.mkdir(parents=True)
    for name in reversed(GAMES) if backwards else GAMES:
        (games / name).touch()
    config: dict[str, Any] = {
        "rollout_interaction_env_path": str(folder / "my_game.py"),
        "tasks": [*reversed(TASKS)] if backwards else [*TASKS],
        "env": {"games": str(games), "reward": "sparse"},
        "eval": {"episodes": 5, "seed_start": 1000},
        "env_workers": workers,
    }
    if backwards:
        config = dict(reversed(config.items()))
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder / "config.yaml"


@pytest.mark.parametrize(
    ("hash_seed", "backwards", "workers"), [("0", False, 1), ("1", True, 2), ("77", True, 8)]
)
def test_the_hash_is_the_same_in_every_process_folder_and_order(
    tmp_path: Path, hash_seed: str, backwards: bool, workers: int
) -> None:
    config = write_yaml(tmp_path, backwards=backwards, workers=workers)
    # A process that is forked from a warm one would have that one's hash seed.
    command = [sys.executable, "-m", "inspection", "panel", str(config)]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert printed.endswith("\npanel a9eeecd75517: 10 episodes\n"), (
        "the same in every version of Python"
    )
    assert "1000 to 1004" in printed


def panel(*arguments: object) -> str:
    """Call the command, and return the hash that it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert slime_verlog("panel", *arguments) == 0
    return printed.getvalue().splitlines()[-1].split()[1].strip(":")


@given(st.lists(EPISODES, min_size=1, max_size=4), st.randoms(use_true_random=False), EPISODES)
def test_the_hash_tells_sets_of_episodes_apart(
    episodes: list[EpisodeSpec], rng: random.Random, other: EpisodeSpec
) -> None:
    shuffled = [
        replace(episode, episode_id=9, name="another label") for episode in [*episodes, episodes[0]]
    ]
    rng.shuffle(shuffled)
    assert panel_hash(shuffled) == panel_hash(episodes)
    is_new = other.env not in [episode.env for episode in episodes]
    assert (panel_hash([*episodes, other]) != panel_hash(episodes)) == is_new


def test_every_option_that_decides_the_episodes_counts_and_others_do_not() -> None:
    changes = [
        "",
        "env.max_steps=25",
        "eval.max_turns=10",
        "eval.seed_start=5",
        "eval.episodes=31",
        "max_turns=9",
    ]
    hashes = [panel(ERRANDS, *(["--set", change] if change else [])) for change in changes]
    assert len({*hashes}) == len(changes)
    assert hashes[0] == panel(
        ERRANDS, "--set", "n_env=4", "--set", "memory.n=3", "--episodes", "32"
    )


def test_options_that_the_environment_refuses_have_no_hash() -> None:
    said = error_of("panel", ERRANDS, "--set", "env.max_step=25")
    assert "unknown key 'env.max_step'; did you mean 'env.max_steps'?" in said


def test_the_tables_of_evaluations_and_studies_have_the_hash(tmp_path: Path) -> None:
    config, *out = write_config(tmp_path, tasks=["count"])
    assert evaluate(config, *out, "--player", "random", "--episodes", "2") == 0
    wanted = panel(config, "--episodes", "2")
    assert {row["panel"] for row in rows_of(tmp_path)} == {wanted}
    assert f"Held-out panel: {wanted}." in (tmp_path / "out" / "table.md").read_text()

    report = pytest.importorskip(
        "embedded.studies.report", reason="needs pip install 'slime-verlog[embedded]'"
    )
    longer = Variant(keys={"env": {"max_steps": 64}})
    study = Study(
        question="Which?", config=ERRANDS, eval_episodes=32, variants={"a": Variant(), "b": longer}
    )
    of_a = panel(ERRANDS)
    of_b = panel(ERRANDS, "--set", "env.max_steps=64")
    assert f"different held-out panels: {of_a} (a); {of_b} (b)." in report.table(study, [])
