"""The page of episodes that an evaluation wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspection import command
from tests.fixtures.chat_server import KEY, ChatServer
from tests.inspection.test_evaluate import evaluate, write_config


def test_the_viewer_reads_what_an_evaluation_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ChatServer(lambda *_: "ACTION: <b>dance</b>") as server:
        assert evaluate(*write_config(tmp_path), "--player", server.url, "--model", "closed-1") == 0
    with pytest.raises(SystemExit, match="0"):
        command.main(["view", str(tmp_path / "out")])
    assert "dance" in (tmp_path / "out" / "episodes.jsonl").read_text()
    page = (tmp_path / "out" / "episodes.html").read_text()
    assert 'id="chunk-0"' in page and "dance" not in page, "episodes are compressed"
