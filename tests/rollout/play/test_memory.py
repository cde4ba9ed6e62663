"""Memories: the past turns that a prompt shows, for every kind."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import make_observation
from rollout.bridge.settings import MemorySettings
from rollout.errors import ConfigError
from rollout.play.conversation import build_messages
from rollout.play.memory import Exchange, build_memory
from tests.conftest import load_recording


def past(count: int) -> list[Exchange]:
    return [
        Exchange(
            make_observation(f"long {k}", f"short {k}"),
            f"THINK: t{k}\nACTION: a{k}",
            k % 3 != 0,
            f"a{k}",
        )
        for k in range(count)
    ]


def shown(kind: str, index: int, **config: int) -> list[str]:
    memory = build_memory(MemorySettings(kind=kind, **config))
    kept = past(index) if memory.horizon is None else past(index)[max(0, index - memory.horizon) :]
    messages = build_messages(
        memory, "rules", kept, make_observation("long now", "short now"), index, "Answer."
    )
    return [f"{m['role']}: {m['content']}" for m in messages]


@given(index=st.integers(0, 30), n=st.integers(0, 40))
def test_a_window_shows_the_last_n_turns_in_order(index: int, n: int) -> None:
    messages = shown("window", index, n=n)
    assert len(messages) == 2 + 2 * min(n, index)
    assert messages[1:-1:2] == [
        f"user: Observation:\nlong {k}" for k in range(index - min(n, index), index)
    ]


def test_actions_only_leaves_the_reasoning_out() -> None:
    assert shown("actions_only", 3, n=2)[2::2] == ["assistant: a1", "assistant: a2"]


def test_only_the_current_observation_shows_its_short_term_part() -> None:
    assert [text for text in shown("full", 9) if "short" in text] == [shown("full", 9)[-1]]


@given(index=st.integers(0, 40), period=st.integers(1, 7))
def test_periodic_clear_grows_and_is_emptied_every_period_turns(index: int, period: int) -> None:
    assert len(shown("periodic_clear", index, period=period)) == 2 + 2 * (index % period)


FACTORIES = """
class Memory:
    horizon = 1

    def __init__(self, shown):
        self.shown = shown

    def messages(self, past, index):
        return self.shown() if callable(self.shown) else self.shown

last = lambda settings: Memory(message for message in [{"role": "user", "content": "You went left."}])
none = lambda settings: None
text = lambda settings: Memory("You went left.")
number = lambda settings: Memory([{"role": "user", "content": 5}])
half = lambda settings: Memory([{"role": "user", "content": "\\ud800"}])
breaks = lambda settings: Memory(lambda: 1 / 0)
"""


def test_a_factory_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORIES)
    assert shown(f"{tmp_path}/mine.py:last", 1)[1:2] == ["user: You went left."]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("windw", "memory.kind 'windw' is unknown"),
        ("no.such.module", "memory.kind: there is no module no.such"),
        ("{folder}/mine.py:none", "returned None; return an object with `horizon`"),
        ("{folder}/mine.py:text", "Memory.messages must return a list"),
        ("{folder}/mine.py:number", "Memory.messages must return a list.*content is 5"),
        ("{folder}/mine.py:half", "Memory.messages must return a list.*surrogates not allowed"),
        ("{folder}/mine.py", "names no function; give .*mine.py:FUNCTION"),
        ("{folder}/mine.py:breaks", "ZeroDivisionError: division by zero at .*mine.py:16"),
    ],
)
def test_a_memory_that_is_unknown_or_does_not_work_is_named(
    tmp_path: Path, kind: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(FACTORIES)
    with pytest.raises(ConfigError, match=told):
        shown(kind.format(folder=tmp_path), 1)


@pytest.mark.parametrize("family", ["babyai", "babaisai"])
def test_prompts_lay_out_history_as_verlog_does(family: str) -> None:
    """The request for an answer is in our own words, and a rejected answer is not shown; the rest
    is the same."""
    (episode,) = [
        e for e in load_recording("verlog_prompts.json.gz")["episodes"] if e["env"] == family
    ]
    memory = build_memory(MemorySettings())
    for step, following in itertools.pairwise(episode["steps"]):
        shown, now = following["messages"][0]["content"], following["messages"][-1]["content"]
        long_term = now.removeprefix("Current Observation:\n").split("\n\nWhat will you do next?")[
            0
        ]
        before = make_observation(shown.removeprefix("Observation:\n"))
        exchange = Exchange(
            before, following["full_action"], following["is_valid"], following["executed"]
        )
        messages = build_messages(memory, "", [exchange], make_observation(long_term), 1, "Answer.")
        assert messages[0] == following["messages"][0]
        if following["is_valid"]:
            assert messages[1] == following["messages"][1]
        else:
            assert messages[1]["content"] == f"Previous plan:\nACTION: {following['executed']}"
        assert messages[2]["content"] == f"Current Observation:\n{long_term}\n\nAnswer."
        assert step["messages"][-1]["role"] == "user"
