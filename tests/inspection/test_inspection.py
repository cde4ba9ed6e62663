"""The page of episodes that an evaluation wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspection import viewer
from rollout.errors import ConfigError
from tests.fixtures.chat_server import KEY, ChatServer
from tests.inspection.test_evaluate import evaluate, write_config


def test_the_viewer_shows_every_episode_and_escapes_the_models_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ChatServer(lambda *_: "ACTION: <b>dance</b>") as server:
        assert evaluate(*write_config(tmp_path), "--player", server.url, "--model", "closed-1") == 0
    viewer.main([str(tmp_path / "out" / "episodes.jsonl")])
    page = (tmp_path / "out" / "episodes.html").read_text()
    assert page.count("<article") == 8
    assert "&lt;b&gt;dance&lt;/b&gt;" in page and "<b>dance" not in page


@pytest.mark.parametrize("text", ["{", "[]", '{"story": 3}'])
def test_a_line_that_is_not_an_episode_is_refused_by_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1, is not an episode"):
        viewer.read_episodes(path, 10)
