"""Notes in separate turns: when they are asked for, and what the prompts show."""

from collections.abc import Sequence
from typing import Any

import pytest

from envs.base import make_observation
from rollout.bridge.settings import MemorySettings
from rollout.play.conversation import Conversation
from rollout.play.memory import build_memory
from rollout.play.notes import SUMMARY_REQUEST
from rollout.turn import EnvReply


def reply(step: int, facts: Sequence[str] = (), **more: Any) -> EnvReply:
    message = {"role": "user", "content": f"step {step}"}
    observation = make_observation(f"step {step}")
    return EnvReply(observation, [message], "rules", "Answer.", "left", True, facts=facts, **more)


def talk(steps: int, notes: Sequence[str], **config: Any) -> list[str]:
    """All prompts as text while `steps` turns are played and these notes written."""
    conversation = Conversation(build_memory(MemorySettings(kind="notes", **config)))
    texts: list[str] = []
    written = iter(notes)

    def show(step: int, *, notes: bool = False) -> None:
        messages = conversation.show(reply(step), notes=notes)
        texts.append("\n".join(message["content"] for message in messages))

    show(0)
    for step in range(1, steps + 1):
        conversation.answered(
            reply(step - 1).observation, f"ACTION: a{step - 1}", True, f"a{step - 1}"
        )
        show(step)
        if conversation.wants_notes(0, fits=True):
            texts.pop()
            show(step, notes=True)
            conversation.noted(next(written))
            show(step)
    return texts


def test_prompts_show_the_task_the_notes_the_kept_turns_and_what_happened_since() -> None:
    texts = talk(5, ["red key", "went left"], every=2, keep=1, max_tokens=9)
    old = lambda *steps: "".join(
        f"\nObservation:\nstep {k}\nPrevious plan:\nACTION: a{k}" for k in steps
    )
    now = lambda step, notes="": (
        f"\nCurrent Observation:\nstep {step}\n\n" + (f"Your notes:\n{notes}\n\n" if notes else "")
    )
    request = SUMMARY_REQUEST.format(9)
    assert texts == [
        f"rules{now(0)}Answer.",
        f"rules{old(0)}{now(1)}Answer.",
        f"rules{old(0, 1)}{now(2)}{request}",
        f"rules{old(1)}{now(2, 'red key')}Answer.",
        f"rules{old(1, 2)}{now(3, 'red key')}Answer.",
        f"rules{old(1, 2, 3)}{now(4, 'red key')}{request}",
        f"rules{old(3)}{now(4, 'went left')}Answer.",
        f"rules{old(3, 4)}{now(5, 'went left')}Answer.",
    ]


@pytest.mark.parametrize(
    ("response", "notes"),
    [
        ("<think>\nIs the key blue?\n</think>\n\nred key", "red key"),
        ("Is the key blue?\n</think>\n\nred key", "red key"),
        ("<think>\nIs the key blue?", "old"),
        ("<think>blue?</think>\n<think>Or red?", "old"),
        ("<think>\nIs the key blue?\n</think>\n", "old"),
    ],
)
def test_reasoning_is_no_part_of_the_notes(response: str, notes: str) -> None:
    shown = talk(2, ["old", response], every=1, keep=0)[-1]
    assert shown == f"rules\nCurrent Observation:\nstep 2\n\nYour notes:\n{notes}\n\nAnswer."
    conversation = Conversation(build_memory(MemorySettings(kind="notes", max_tokens=1)))
    assert conversation.cut_notes(response) == ("" if notes == "old" else "red ")


def test_notes_are_asked_for_before_a_prompt_beyond_the_budget_and_never_twice_in_a_row() -> None:
    conversation = Conversation(build_memory(MemorySettings(kind="notes", every=9, budget=50)))
    conversation.show(reply(0))
    assert not conversation.wants_notes(51, fits=True), "nothing has happened yet"
    conversation.answered(reply(0).observation, "x", True, "x")
    assert [conversation.wants_notes(n, fits=True) for n in (50, 51)] == [False, True]
    assert conversation.wants_notes(50, fits=False)
    conversation.noted("x")
    assert not conversation.wants_notes(51, fits=False)


def test_whole_prompts_are_never_summarised() -> None:
    conversation = Conversation(build_memory(MemorySettings(kind="notes", every=1)))
    conversation.show(reply(0, whole_prompts=True))
    conversation.answered(reply(0).observation, "x", True, "x")
    assert not conversation.wants_notes(9999, fits=False)


def test_facts_are_kept_by_age_in_rewrites() -> None:
    conversation = Conversation(build_memory(MemorySettings(kind="notes", every=1)))
    found = []
    for step, notes in enumerate(["the Red key", "RED and blue", "blue", "blue", "", "none"]):
        conversation.show(reply(step, facts=["red"] if step == 0 else ["red", "blue"]))
        conversation.answered(reply(step).observation, "x", True, "x")
        conversation.noted(notes)
        found.append(conversation.facts_kept())
    assert found[0] == {"facts_kept": 1.0, "facts_kept_1": 1.0}
    assert found[1] == {"facts_kept": 1.0, "facts_kept_2_to_4": 1.0, "facts_kept_1": 1.0}
    assert found[2] == {"facts_kept": 0.5, "facts_kept_2_to_4": 0.5}
    assert found[4] == {"facts_kept": 0.5, "facts_kept_5_and_more": 0.0, "facts_kept_2_to_4": 1.0}
    assert found[5] == {"facts_kept": 0.0, "facts_kept_5_and_more": 0.0}
