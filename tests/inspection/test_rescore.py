"""`slime-verlog rescore`: another reward or judge over recorded episodes, without playing them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from inspection.records import read_episodes
from tests.fixtures.command import error_of, slime_verlog
from tests.fixtures.judge_server import JudgeServer
from tests.fixtures.recorded_episodes import make_turn, write

REWARDS = """
def number(episode):
    return 1 - len(episode["story"]) / 10

def per_turn(episode):
    return [0.5 * turn["valid"] for turn in episode["story"]]

def text(episode):
    return "good"

def short(episode):
    return [1.0]

def infinite(episode):
    return float("inf")

def texts(episode):
    return ["1"] * len(episode["story"])

def huge(episode):
    return [1e308] * len(episode["story"])

def broken(episode):
    return episode["nothing"]
"""
RUBRIC = {"criteria": [{"name": "care", "description": "Is it careful?"}]}


def rescore(*words: object, of: Callable[..., Any] = slime_verlog) -> Any:
    return of("rescore", *words)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    for seed in (1, 2):
        turns = [make_turn("a door", "ACTION: go", valid=k < seed, reward=0.25) for k in range(3)]
        write(tmp_path / "run", turns, seed=seed, **{"return": 0.75})
    write(tmp_path / "run", [make_turn("lost", "ACTION: go")], seed=3, stop="failed", fault="gone")
    return tmp_path / "run"


def test_a_number_is_paid_in_the_last_turn_and_old_and_new_are_compared(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run.parent / "new"
    assert rescore(run, "--with", f"{run.parent}/rewards.py:number", "--out", out) == 0
    new = list(read_episodes(out))
    assert [episode["return"] for episode in new] == pytest.approx([0.7, 0.7])
    assert [turn["reward"] for turn in new[0]["story"]] == pytest.approx([0.0, 0.0, 0.7])
    assert [episode["seed"] for episode in new] == [1, 2], "the failed episode is left out"
    old = next(read_episodes(run))
    assert all(new[0][key] == old[key] for key in set(old) - {"return", "story"})
    said = capsys.readouterr().out
    assert "0.750  0.700  -0.050" in said and f"2 episodes written to {out}" in said
    rescore(run, "--with", f"{run.parent}/rewards.py:per_turn", "--out", out, "--overwrite")
    assert [episode["return"] for episode in read_episodes(out)] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("text", "task t, seed 1 (3 turns) is 'good'; return a number"),
        ("short", "is [1.0]; return a number, or one number per turn"),
        ("infinite", "is inf; return"),
        ("texts", "is ['1', '1', '1']; return"),
        ("huge", "is [1e+308, 1e+308, 1e+308]; return"),
        ("broken", "fails on task t, seed 1: KeyError: 'nothing' at "),
    ],
)
def test_a_reward_that_cannot_be_used_gives_one_sentence_and_writes_nothing(
    run: Path, function: str, words: str
) -> None:
    given = ["--with", f"{run.parent}/rewards.py:{function}", "--out", run.parent / "new"]
    assert words in rescore(run, *given, of=error_of)
    assert not (run.parent / "new" / "episodes.jsonl").exists()


def test_episodes_that_are_there_are_replaced_only_on_request(run: Path) -> None:
    given = ["--with", f"{run.parent}/rewards.py:number", "--out"]
    rescore(run, *given, run.parent / "new")
    assert "--overwrite" in rescore(run, *given, run.parent / "new", of=error_of)
    rescore(run, *given, run.parent / "new", "--overwrite")
    assert "would be lost" in rescore(run, *given, run, "--overwrite", of=error_of)
    assert next(read_episodes(run))["return"] == 0.75


@pytest.mark.parametrize("when", ["every", "end"])
def test_a_judge_pays_what_it_would_have_paid_in_play(tmp_path: Path, when: str) -> None:
    def verdict(body: dict[str, Any], number: int) -> str:
        turns = json.loads(body["messages"][-1]["content"])["turns"]
        return json.dumps({"care": len(turns) + ("left" in turns[-1]["answer"]), "feedback": "so"})

    game = {"preset": "verlog", "num_dists": 0, "max_steps": 8}
    shared = {
        "tasks": ["goto"],
        "eval": {"episodes": 3, "max_turns": 20},
        "n_env": 2,
        "env_backend": "inline",
    }
    with JudgeServer(verdict) as server:
        judge = {"url": server.url, "rubric": RUBRIC, "when": when, "weight": 0.5}
        judged = {"inner": "envs.babyai", "options": game, "judge": judge}
        for name, path, env in (("plain", "envs.babyai", game), ("judged", "envs.judge", judged)):
            config = {"rollout_interaction_env_path": path, "env": env, **shared}
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
            slime_verlog(
                "evaluate",
                f"{tmp_path / name}.yaml",
                "--player",
                "random",
                "--out",
                tmp_path / name,
            )
        rescore(tmp_path / "plain", "--judge", tmp_path / "judged.yaml", "--out", tmp_path / "new")
    played, new = (list(read_episodes(tmp_path / name)) for name in ("judged", "new"))
    rewards = [
        {e["seed"]: [turn["reward"] for turn in e["story"]] for e in episodes}
        for episodes in (played, new)
    ]
    assert rewards[0] == rewards[1] and len(new) == 3
    assert any(reward > 0 for rewards in rewards[0].values() for reward in rewards)
