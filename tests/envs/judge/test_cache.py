"""The judge's cache: what a kept verdict depends on, and what happens when the file is damaged."""

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envs.errors import ConfigError
from envs.judge import JudgeClient
from envs.loading import build_env_from
from tests.envs.judge.test_judge import CRITERIA, GOOD, RUBRIC, build, play
from tests.fixtures.judge_server import JudgeServer


def test_verdicts_are_cached_in_a_file_that_runs_share(tmp_path: Path) -> None:
    cache = str(tmp_path / "deep" / "verdicts.sqlite")
    first, server = play(lambda body, number: GOOD, cache=cache)
    assert len(server.requests) == 1
    with JudgeServer(lambda body, number: 500) as dead:
        env = build(server, cache=cache)
        assert env.deterministic and not build(dead).deterministic
        env.reset()
        assert env.step("ACTION: right")[2]["reward"] == first[0][2]["reward"]


def asked_again(cache: Path, **judge: Any) -> int:
    """How many questions a play with this cache costs."""
    outcome, server = play(lambda body, number: GOOD, cache=str(cache), **judge)
    assert outcome[0][2]["metrics"]["judge/score"] == pytest.approx(0.9)
    return len(server.requests)


@pytest.fixture
def same_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server of a test says the same address, so that only other differences can tell cache
    keys apart."""
    key = JudgeClient._key
    nowhere = lambda client: SimpleNamespace(
        settings=client.settings.model_copy(update={"url": "http://judge"})
    )
    monkeypatch.setattr(
        JudgeClient, "_key", lambda client, *arguments: key(nowhere(client), *arguments)
    )


def test_a_cached_verdict_that_cannot_be_read_is_asked_for_again(
    tmp_path: Path, same_url: None
) -> None:
    cache = tmp_path / "verdicts.sqlite"
    assert [asked_again(cache), asked_again(cache)] == [1, 0]
    bad = [
        '{"progress": 1, "progress": 10, "care": 1, "feedback": ""}',
        "I think 7.",
        b"\x00",
        None,
    ]
    for text in bad:
        with sqlite3.connect(cache) as connection:
            connection.execute("UPDATE verdicts SET text = ?", (text,))
        assert [asked_again(cache), asked_again(cache)] == [1, 0]


def test_a_damaged_cache_is_named_or_costs_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "verdicts.sqlite"
    with JudgeServer(lambda body, number: GOOD) as server:
        env = build(server, cache=str(cache))
        env.reset()
        cache.write_bytes(b"no database" * 100)
        assert env.step("ACTION: right")[2]["metrics"]["judge/score"] == pytest.approx(0.9)
        assert "cannot be used" in caplog.text and str(cache) in caplog.text
        with pytest.raises(ConfigError, match=f"{cache} cannot be used: .*delete it"):
            build(server, cache=str(cache))
        with pytest.raises(ConfigError, match="set env.judge.model"):
            build(server, cache=str(tmp_path / "other.sqlite"), model="default")


DIFFERENT: dict[str, dict[str, Any]] = {
    "rubric's weights": {
        "rubric": {**RUBRIC, "criteria": [{**criterion, "weight": 2} for criterion in CRITERIA]}
    },
    "model": {"model": "another"},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_verdict_is_cached_for_one_rubric_and_model(
    tmp_path: Path, same_url: None, what: str
) -> None:
    template = tmp_path / "short.j2"
    template.write_text("Score the play.")
    shown = {**RUBRIC, "prompt_template": str(template)}
    cache = tmp_path / "verdicts.sqlite"
    assert asked_again(cache, rubric=shown) == 1
    other = {**DIFFERENT[what]}
    other["rubric"] = {**other.get("rubric", RUBRIC), "prompt_template": str(template)}
    _, server = play(lambda body, number: GOOD, cache=str(cache), **other)
    assert len(server.requests) == 1
    assert asked_again(cache, rubric=shown) == 0


def test_a_verdict_is_cached_for_one_task(tmp_path: Path) -> None:
    with JudgeServer(lambda body, number: GOOD) as server:
        for task in ("count", "count", "other"):
            settings = {
                "url": server.url,
                "rubric": RUBRIC,
                "model": "small",
                "cache": str(tmp_path / "verdicts.sqlite"),
            }
            options = {"tools": [], "data": [{"question": "2 + 3?", "answer": "5"}]}
            env = {"inner": "envs.tools", "options": options, "judge": settings}
            env = build_env_from("envs.judge", {"task": task, "seed": 0}, env)
            env.reset()
            env.step("5")
        assert len(server.requests) == 2
