"""The judge's cache: what a kept verdict depends on, and what happens when the file is damaged."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from envs.errors import ConfigError, EnvironmentFault
from envs.judge import JudgeClient, VerdictCache
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
    """Every server of a test says the same address, so that only other differences can tell cache keys apart."""
    monkeypatch.setattr(JudgeClient, "_key", _key_without_url(JudgeClient._key))


def _key_without_url(key: Any) -> Any:
    def of_one_url(self: Any, *arguments: Any) -> str:
        _ = self._model
        self.settings, kept = self.settings.model_copy(update={"url": "http://judge"}), self.settings
        try:
            return key(self, *arguments)
        finally:
            self.settings = kept

    return of_one_url


def test_a_cached_verdict_that_cannot_be_read_is_asked_for_again(tmp_path: Path, same_url: None) -> None:
    cache = tmp_path / "verdicts.sqlite"
    assert [asked_again(cache), asked_again(cache)] == [1, 0]
    bad = ['{"progress": 1, "progress": 10, "care": 1, "feedback": ""}', "I think 7.", b"\x00", None]
    for text in bad:
        with sqlite3.connect(cache) as connection:
            connection.execute("UPDATE verdicts SET text = ?", (text,))
        assert [asked_again(cache), asked_again(cache)] == [1, 0]


@pytest.mark.parametrize("how", ["text", "cut", "pages"])
def test_a_damaged_cache_is_replaced_with_a_warning(
    tmp_path: Path, same_url: None, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "verdicts.sqlite"
    asked_again(cache)
    whole = cache.read_bytes()
    damaged = {"text": b"no database" * 100, "cut": whole[:5000], "pages": whole[:4096] + b"\xff" * 8192}[how]
    cache.write_bytes(damaged)
    assert asked_again(cache) == 1
    assert "is damaged" in caplog.text and str(cache) in caplog.text
    assert (tmp_path / "verdicts.sqlite.damaged").read_bytes() == damaged
    assert asked_again(cache) == 0


def test_a_cache_that_is_damaged_during_an_episode_costs_one_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "verdicts.sqlite"
    with JudgeServer(lambda body, number: GOOD) as server:
        for _ in range(2):
            env = build(server, cache=str(cache))
            env.reset()
            cache.write_bytes(b"no database" * 100)
            assert env.step("ACTION: right")[2]["metrics"]["judge/score"] == pytest.approx(0.9)
        env = build(server, cache=str(cache))
        env.reset()
        env.step("ACTION: right")
        assert len(server.requests) == 2 and "is damaged" in caplog.text


def test_a_cache_that_is_locked_or_another_programs_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    foreign = tmp_path / "foreign.sqlite"
    with contextlib.closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE verdicts (case_number INTEGER)")
    with JudgeServer(lambda body, number: GOOD) as server, pytest.raises(ConfigError, match="cannot be used: no such"):
        build(server, cache=str(foreign))
    cache = VerdictCache(str(tmp_path / "verdicts.sqlite"))
    cache._path = tmp_path
    cache.put("key", GOOD)
    assert cache.get("key") is None and "cannot be used" in caplog.text


DIFFERENT: dict[str, dict[str, Any]] = {
    "rubric's weights": {"rubric": {**RUBRIC, "criteria": [{**criterion, "weight": 2} for criterion in CRITERIA]}},
    "rubric's scale": {"rubric": {**RUBRIC, "scale": [0, 12]}},
    "model": {"model": "another"},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_verdict_is_cached_for_one_rubric_and_model(tmp_path: Path, same_url: None, what: str) -> None:
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


def test_a_verdict_is_cached_for_the_model_that_the_server_reports(tmp_path: Path, same_url: None) -> None:
    def asks(model: str | None) -> int:
        with JudgeServer(lambda body, number: GOOD, model) as server:
            env = build(server, cache=str(tmp_path / "verdicts.sqlite"))
            env.reset()
            env.step("ACTION: right")
            return len(server.requests)

    assert [asks("small"), asks("small"), asks("large"), asks(None), asks("large")] == [1, 0, 1, 1, 0]


def test_a_verdict_is_cached_for_one_task(tmp_path: Path) -> None:
    with JudgeServer(lambda body, number: GOOD) as server:
        for task in ("count", "count", "other"):
            settings = {"url": server.url, "rubric": RUBRIC, "cache": str(tmp_path / "verdicts.sqlite")}
            options = {"tools": [], "data": [{"question": "2 + 3?", "answer": "5"}]}
            env = {"inner": "envs.tools", "options": options, "judge": settings}
            env = build_env_from("envs.judge", {"task": task, "seed": 0}, env)
            env.reset()
            env.step("5")
        assert len(server.requests) == 2


def test_an_unusable_answer_is_not_cached(tmp_path: Path) -> None:
    cache = str(tmp_path / "verdicts.sqlite")
    with pytest.raises(EnvironmentFault):
        play(lambda body, number: "I think 7.", cache=cache, max_retries=0)
    (_, _, info), _ = play(lambda body, number: GOOD, cache=cache)[0][0], None
    assert info["metrics"]["judge/score"] == pytest.approx(0.9)
