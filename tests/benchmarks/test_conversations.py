"""The counting of recorded conversations, on made-up turns."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conversations import as_chains, as_skyrl, as_slime, as_turns, distinct_tokens, main
from tests.fixtures.checkouts import slime_checkouts


def turn(prompt: list[int], response: list[int], *said: str) -> dict[str, Any]:
    """A turn whose messages alternate between user and assistant; the last of `said` is the
    response."""
    messages = [
        {"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(said)
    ]
    return {
        "prompt": prompt,
        "response": response,
        "messages": messages[:-1],
        "answer": messages[-1],
    }


MAIN = [turn([1, 2], [3, 4], "go", "a"), turn([1, 2, 3, 4, 5], [6], "go", "a", "more", "b")]
ASIDE = turn([9], [8], "a title", "t")
INTERRUPTED = [MAIN[0], ASIDE, MAIN[1]]
REWRITTEN = [MAIN[0], turn([1, 2, 7, 5], [6], "go", "A", "more", "b")]


def test_each_rule_counts_what_it_trains() -> None:
    assert (
        distinct_tokens(MAIN) == 6
        and distinct_tokens(INTERRUPTED) == 8
        and distinct_tokens(REWRITTEN) == 7
    )
    assert as_chains(MAIN) == as_skyrl(MAIN) == ([6], 3)
    assert as_turns(MAIN) == ([4, 6], 3)
    assert as_chains(INTERRUPTED) == ([6, 2], 4), "a request of its own does not end the chain"
    assert as_skyrl(INTERRUPTED) == ([4, 2, 6], 4), "only the turn just before is compared"
    assert as_chains(REWRITTEN) == as_skyrl(REWRITTEN) == ([4, 5], 3)


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """slime can be imported, and other tests of this process do not find it."""
    if not (checkouts := slime_checkouts()):
        pytest.skip("set SLIME_PATH to a slime checkout")
    monkeypatch.syspath_prepend(checkouts[0])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


@pytest.mark.usefixtures("slime")
def test_slimes_manager_trains_no_response_that_was_rewritten() -> None:
    assert as_slime(MAIN) == ([6], 3)
    assert as_slime(INTERRUPTED) == ([6, 2], 4)
    assert as_slime(REWRITTEN) == ([5], 1)


@pytest.mark.usefixtures("slime")
def test_a_row_for_each_recording_and_rule(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_up.jsonl").write_text(
        "".join(json.dumps(turn) + "\n" for turn in INTERRUPTED)
    )
    monkeypatch.setattr(sys, "argv", ["conversations", str(tmp_path / "made_up.jsonl")])
    main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[1:4] == [
        "made_up,chains,3,8,2,8,1.000,1.000",
        "made_up,turns,3,8,3,12,1.500,1.000",
        "made_up,skyrl,3,8,3,12,1.500,1.000",
    ]
