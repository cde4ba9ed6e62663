"""`slime-verlog branch`: exact replays, values against known ones, resumed runs, and what is
refused."""

import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspection.branch.values import explained, mean_of, return_to_go
from inspection.command import main
from inspection.records import read_episodes
from tests.cases import some
from tests.envs.contract import CASES, Case
from tests.fixtures.command import error_of, slime_verlog
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.warm_python import CONTEXT
from tests.inspection.test_evaluate import at, engine, evaluate, write_config

__all__ = ["engine"]  # a fixture


def branch(run: Path, options: str, *words: str, of: Callable[..., Any] = slime_verlog) -> Any:
    """Branch `run / out` into `run / branches`."""
    return of("branch", run / "out", "--out", run / "branches", *options.split(), *words)


def values_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "branches" / "values.json").read_text())


def counted(run: Path, **keys: Any) -> list[str]:
    """Play four random episodes of the counting game; returns the command's options."""
    given = [*write_config(run, tasks=["count"], **keys), "--player", "random"]
    assert evaluate(*given) == 0
    return given


def prompts_of(episode: dict[str, Any], count: int) -> list[Any]:
    """The messages of the first prompts."""
    return [[episode["messages"][i] for i in turn["prompt"]] for turn in episode["story"][:count]]


NAMES = """
textarena-2048-v0 textarena-Minesweeper-v0-small gymnasium_text-MiniHack-Corridor-R2-v0
babyai-BabyAI-MixedTrainLocal-v0/goto babyai-errands babaisai-env/two_room-make_you crafter-default sokoban-two_boxes
recall-recall textworld-custom gymnasium_text-NetHackScore-v0
"""
QUICK = ("babyai-BabyAI-MixedTrainLocal-v0/goto", "recall-recall")


def replayed() -> list[Any]:
    named = {str(case): case for case in reversed(CASES)}
    return some([named[name] for name in NAMES.split()], [named[name] for name in QUICK])


@pytest.mark.parametrize("case", replayed(), ids=str)
def test_a_branch_sees_what_the_record_saw_up_to_its_turn(tmp_path: Path, case: Case) -> None:
    """Four environments run games of other packages: TextArena, MiniHack and NLE."""
    case.build().close()  # skips the test if a package is missing
    notes = {"kind": "notes", "every": 4, "budget": 4096, "keep": 1, "max_tokens": 32}
    keys = {
        "rollout_interaction_env_path": case.module,
        "tasks": [case.task],
        "env": dict(case.options),
    }
    keys |= {"max_turns": 12, "eval": {"episodes": 1}, "env_backend": "process", "env_workers": 1}
    keys |= {"memory": notes} if case.module == "envs.recall" else {}
    assert evaluate(*write_config(tmp_path, **keys), "--player", "random") == 0
    (record,) = read_episodes(tmp_path / "out")
    story = record["story"]
    last = len(story)
    assert branch(tmp_path, f"--turn 1,{last // 2},{last} --times 2 --player random") == 0
    found = list(read_episodes(tmp_path / "branches"))
    assert len(found) == 2 * len({1, last // 2, last})
    for episode in found:
        past = episode["branch"]["turn"] - 1
        steps = sum("summary" not in turn for turn in story[:past])
        assert episode["digests"][: steps + 1] == record["digests"][: steps + 1]
        prompts = [prompts_of(one, past + 1) for one in (record, episode)]
        assert prompts[0] == prompts[1], "of the new turn, too"
        assert [turn["response"] for turn in episode["story"][:past]] == [
            turn["response"] for turn in story[:past]
        ]


def test_values_of_a_known_game_lie_in_their_intervals(tmp_path: Path) -> None:
    """The random player earns 1 in half of the turns with an even number; the episode's length is
    known."""
    counted(tmp_path, env={"max_length": 40}, gamma_step=0.9)
    number, record = max(
        enumerate(read_episodes(tmp_path / "out"), 1), key=lambda one: one[1]["turns"]
    )
    length = record["turns"]
    turns = [1, 2, length // 2, length - 2]
    words = ["--turn", ",".join(map(str, turns))]
    assert branch(tmp_path, f"--episode {number} --times 64 --player random", *words) == 0
    states = values_of(tmp_path)["states"]
    assert [(state["turn"], state["n"]) for state in states] == [(turn, 64) for turn in turns]
    for turn, state in zip(turns, states, strict=True):
        paid = [0.9 ** (later - turn) / 2 for later in range(turn, length + 1) if later % 2 == 0]
        plain = state["return_to_go"]
        discounted = state["discounted"]
        assert plain["low"] <= len(paid) / 2 <= plain["high"]
        assert discounted["low"] <= sum(paid) <= discounted["high"]
        assert state["own"]["return_to_go"] == sum(
            one["reward"] for one in record["story"][turn - 1 :]
        )


SURE = """
from tests.fixtures.counting_env import CountingGame, CountingSettings
from envs.base import describe_task, read_env_settings

class Sure(CountingGame):
    def play(self, action):
        return super().play("right")

def build_env(sample, args):
    return Sure(read_env_settings(CountingSettings, args), describe_task(sample)[1])
"""


def test_a_game_without_luck_is_explained_whole_and_a_larger_sample_adds_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sure.py").write_text(SURE)
    counted(tmp_path, rollout_interaction_env_path=str(tmp_path / "sure.py"))
    assert branch(tmp_path, "--sample 6 --times 2 --player random") == 0
    first = len(list(read_episodes(tmp_path / "branches")))
    assert branch(tmp_path, "--sample 12 --times 2 --player random") == 0
    words = "the state explains 1.000 [1.000, 1.000] of the variance of the return from 12 states of 4 episodes"
    assert words in capsys.readouterr().out
    assert first == 12 and len(list(read_episodes(tmp_path / "branches"))) == 24
    assert values_of(tmp_path)["explainable"]["discounted"]["value"] == pytest.approx(1.0)


def test_the_share_and_its_interval_are_those_of_the_process_that_made_the_returns() -> None:
    """Twenty states in each of 60 episodes: 1 of the variance is the episode's, 1 the state's, 4
    luck."""
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(10):
        episodes = np.repeat(np.arange(60), 20)
        values = draw.normal(size=60)[episodes] + draw.normal(size=1200)
        found = explained(values[:, None] + 2 * draw.normal(size=(1200, 4)), episodes.tolist())
        assert (
            found.value == pytest.approx(1 / 3, abs=0.1)
            and found.low is not None
            and found.high is not None
        )
        hits += found.low <= 1 / 3 <= found.high
    assert hits >= 8
    assert math.isnan(explained([[1.0, 1.0], [1.0, 1.0]], [1, 2]).value)


def test_a_critic_explains_what_its_values_and_the_returns_share() -> None:
    """Of 6 in all, 2 lie between states. A critic explains 2 if it knows them, 1 with noise of 1,
    and less than 0."""
    draw = np.random.default_rng(0)
    episodes = np.repeat(np.arange(60), 20)
    values = np.sqrt(2) * draw.normal(size=1200)
    returns = values[:, None] + 2 * draw.normal(size=(1200, 4))
    noise = draw.normal(size=1200)
    for guesses, share in (
        (values + 7.0, 2 / 6),
        (values + noise, 1 / 6),
        (0 * values, 0.0),
        (-values, -1.0),
    ):
        found = explained(returns, episodes.tolist(), guesses.tolist())
        assert (
            found.value == pytest.approx(share, abs=0.05) and found.low <= found.value <= found.high
        )


def test_the_mean_has_students_interval_and_notes_are_not_discounted() -> None:
    found = mean_of([1.0, 2.0, 3.0, 4.0])
    assert found.high == pytest.approx(2.5 + 3.182 * math.sqrt(5 / 3) / 2, rel=0.01)
    assert mean_of([1.0, 2.0, 3.0]).high is None
    turns = [
        {"reward": 1.0},
        {"reward": 0.0, "summary": {}},
        {"reward": 2.0, "moves": False},
        {"reward": 4.0},
    ]
    assert return_to_go(turns, 0.5) == 1 + 0.5 * (2 + 4)


@pytest.mark.parametrize(
    "memory", [{"n": 2}, {"kind": "notes", "every": 3, "max_tokens": 8}], ids=str
)
def test_a_model_continues_its_own_episode_and_that_of_a_player_without_tokens(
    engine: ScriptedEngine, tmp_path: Path, memory: dict[str, Any]
) -> None:
    given = write_config(tmp_path, tasks=["count"], env={"max_length": 40}, memory=memory)
    assert evaluate(*given, *at(engine, tmp_path)) == 0
    record = next(read_episodes(tmp_path / "out"))
    asked = len(engine.requests)
    assert branch(tmp_path, "--turn 5 --times 3", *at(engine, tmp_path)) == 0
    new = sum(len(episode["story"]) - 4 for episode in read_episodes(tmp_path / "branches"))
    assert len(engine.requests) - asked == new, "the recorded turns are not asked again"
    for episode in read_episodes(tmp_path / "branches"):
        ids = [turn["token_ids"]["response"] for turn in episode["story"][:4]]
        assert ids == [turn["token_ids"]["response"] for turn in record["story"][:4]]
        assert [turn["tokens"] is None for turn in episode["story"][:5]] == [True] * 4 + [False]
    for name in ("out", "branches"):
        shutil.rmtree(tmp_path / name)
    assert evaluate(*given, "--player", "random") == 0
    assert branch(tmp_path, "--turn 5 --times 2", *at(engine, tmp_path)) == 0
    record = next(read_episodes(tmp_path / "out"))
    for episode in read_episodes(tmp_path / "branches"):
        assert [turn["response"] for turn in episode["story"][:4]] == [
            turn["response"] for turn in record["story"][:4]
        ]


def test_more_branches_than_the_servers_have_sessions_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="OpenEnv needs pip install 'slime-verlog[openenv]'")
    from tests.fixtures.openenv_server import TinyServer

    with TinyServer(capacity=4) as server:
        env = {"url": server.url, "deterministic": True, "max_steps": 6, "default_action": "2"}
        keys = {
            "rollout_interaction_env_path": "envs.openenv",
            "tasks": ["guess"],
            "eval": {"episodes": 1},
            "env": env,
        }
        assert evaluate(*write_config(tmp_path, **keys, n_env=1), "--player", "random") == 0
        words = "--turn 1,2 --times 4 --player random --set env_backend=inline --set n_env="
        said = branch(tmp_path, f"{words}32", of=error_of)
        assert "8 branches would be played at once, and the servers have 4 " in said
        assert branch(tmp_path, f"{words}1") == 0


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    counted(tmp_path)
    for words, sentence in {
        "--turn 99": "--turn 99: episode 1 of {out} has the turns 1 to ",
        "--turn 1 --episode 9": "{out} has no episode 9",
        "--sample 9999": "--sample 9999: the episodes have ",
        "--turn 1 --set env.max_length=3": "--set env: a branch has the settings of its episode",
        "--turn 1 --player expert": "--times 8: the player expert continues a state the same way "
        "each time",
    }.items():
        said = branch(tmp_path, f"--player random {words}", of=error_of)
        assert sentence.format(out=tmp_path / "out") in said


def test_each_point_of_a_sweep_keeps_its_settings_and_a_branch_has_none(tmp_path: Path) -> None:
    given = write_config(tmp_path, tasks=["count"], env={"max_length": 40})
    words = "--player random --sweep memory.n=3 --sweep gamma_step=0.5,1"
    assert evaluate(*given, *words.split()) == 0
    assert branch(tmp_path, "--sample 24 --times 2 --player random") == 0
    recorded = list(read_episodes(tmp_path / "out"))
    for episode in read_episodes(tmp_path / "branches"):
        about = episode["branch"]
        source = recorded[episode["branch"]["episode"] - 1]
        assert episode["setting"] == f"{source['setting']}, turn {about['turn']}"
        count = min(about["turn"], len(episode["story"]))
        assert prompts_of(episode, count) == prompts_of(source, count)
        if source["setting"].endswith("=1"):
            assert about["discounted"] == about["return_to_go"]
    (tmp_path / "branches").rename(tmp_path / "of_branches")
    said = error_of("branch", tmp_path / "of_branches", "--turn", "1", "--player", "random")
    assert "episode 1, is a branch itself; branch from the episodes that it continues, in" in said


def test_a_sweep_over_lists_and_words_is_read_back(tmp_path: Path) -> None:
    given = write_config(tmp_path, tasks=["count"], env={"max_length": 40})
    sweeps = ["--sweep", "tasks=[count,other],[count]", "--sweep", "env.raise_as='7'"]
    assert evaluate(*given, "--player", "random", *sweeps) == 0
    assert branch(tmp_path, "--sample", "12", "--times", "2", "--player", "random") == 0
    settings = {episode["setting"] for episode in read_episodes(tmp_path / "branches")}
    assert any(
        setting.startswith("tasks=['count', 'other'], env.raise_as=7") for setting in settings
    )
    edit(tmp_path / "out" / "episodes.jsonl", lambda record: record.pop("swept"))
    again = branch(tmp_path, "--turn 1 --times 2 --player random", of=error_of)
    assert re.search("episode 1, has no swept", again)


def edit(file: Path, change: Any) -> None:
    """Apply `change` to each record of the file."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        change(record)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path: Path) -> None:
    module = tmp_path / "game.py"
    module.write_text(SURE)
    counted(tmp_path, rollout_interaction_env_path=str(module), env={"max_length": 40})
    file = tmp_path / "out" / "episodes.jsonl"
    whole = file.read_text()

    def refused(sentence: str) -> None:
        assert re.search(
            sentence, branch(tmp_path, "--turn 4 --times 2 --player random", of=error_of)
        )
        assert not (tmp_path / "branches" / "episodes.jsonl").exists()

    edit(file, lambda record: record["story"][1].update(response="no action"))
    refused(
        "the replay of episode 1 of .*game.py .task count, seed 1.* shows something else in turn "
        "3: the env"
    )
    edit(file, lambda record: record.pop("digests"))
    refused("episode 1 of .*game.py .* has no digests of its observations")
    file.write_text(whole)
    (tmp_path / "out" / "run.json").rename(tmp_path / "run.json")
    refused("there is no .*run.json, so the settings of the episodes are unknown")
    (tmp_path / "run.json").rename(tmp_path / "out" / "run.json")
    module.write_text(SURE + "\n")
    refused(
        "holds episodes of another version of the environment: .*game.py changed since; play them "
        "again with"
    )
    shutil.rmtree(tmp_path / "out")
    module.write_text(
        SURE.replace(
            "class Sure(CountingGame):", "class Sure(CountingGame):\n    deterministic = False"
        )
    )
    counted(tmp_path, rollout_interaction_env_path=str(module), env={"max_length": 40})
    refused("error: episode 1 of .*game.py .* cannot be replayed: .* not deterministic")


def _branch(words: list[str]) -> None:
    main(["branch", *words])


@pytest.mark.slow
def test_fifty_kills_leave_whole_rows_and_the_same_branches(tmp_path: Path) -> None:
    """The rest is played after the last kill; random players make all branches equal to those of a
    run without one."""
    counted(tmp_path, env={"max_length": 40, "slow_s": 0.002}, n_env=2)
    words = "--sample 60 --times 12 --player random --set n_env=4 --set env_backend=inline --out"
    given = [str(tmp_path / "out"), *words.split()]
    draw = random.Random(0)
    file = tmp_path / "killed" / "episodes.jsonl"
    kills = 0
    while kills < 50:
        process = CONTEXT.Process(target=_branch, args=([*given, str(tmp_path / "killed")],))
        process.start()
        before = file.stat().st_size if file.exists() else 0
        while process.is_alive() and (not file.exists() or file.stat().st_size == before):
            time.sleep(0.002)
        time.sleep(draw.random() * 0.03)
        assert process.is_alive(), "the run ended before it could be killed"
        process.kill()
        process.join()
        kills += 1
        whole = file.read_bytes().rpartition(b"\n")[0].splitlines() if file.exists() else []
        keys = [
            (row["setting"], row["seed"], row.get("repeat", 0)) for row in map(json.loads, whole)
        ]
        assert len(set(keys)) == len(keys)
    for name in ("killed", "whole"):
        assert slime_verlog("branch", *given, tmp_path / name) == 0
    rows = [
        sorted(json.dumps(row) for row in read_episodes(tmp_path / name))
        for name in ("killed", "whole")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 720
