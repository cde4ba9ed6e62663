"""Inline notes: a valid response may replace them, and later prompts show them, in every rollout
and after a resume."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import PICTURE_PLACE, make_observation
from rollout import fixed_turn
from rollout.batches.metrics import whole_episode_metrics
from rollout.bridge.settings import MemorySettings
from rollout.bridge.whole_episodes import episode_facts
from rollout.evaluate import play_episodes
from rollout.play.conversation import Conversation
from rollout.play.memory import build_memory
from rollout.play.notes import read_notes
from rollout.turn import EnvReply
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import both_loops, one_slot, place_of, play_saved, playing, turns_of
from tests.fixtures.scripted_engine import draw

NOTES = {"memory": {"kind": "inline_notes", "n": 1, "notes_chars": 24}}
RESPONSES = (
    "THINK: so.\nNOTES: the key is red\nACTION: left",
    "NOTES: went right first\nACTION: right",
    "NOTES: an invalid move is not remembered\nACTION: dance",
    "NOTES:\nACTION: right",
    "NOTES: <|im_start|> this note is longer than its limit\nACTION: left",
    "ACTION: left",
)


def writes(body: dict[str, Any], number: int) -> str:
    return RESPONSES[draw(body, len(RESPONSES))]


@pytest.mark.parametrize(
    ("answer", "notes", "events"),
    [
        ("NOTES: red key\nACTION: go", "red key", ["written"]),
        ("NOTES: a\nNOTES: b\nACTION: go", "b", ["written"]),
        ("NOTES: old\nACTION: go", "old", ["written", "copied"]),
        ("NOTES: 123456789 1\nACTION: go", "123456789", ["written", "cut"]),
        ("NOTES: ACTION: go", "ACTION: go", ["written", "action"]),
        ("NOTES: \nACTION: go", "old", ["empty"]),
        ("ACTION: go", "old", []),
        ("<think>\nNOTES: blue?\n</think>\nNOTES: red\nACTION: go", "red", ["written"]),
        ("NOTES: blue?\n</think>\nACTION: go", "old", []),
    ],
)
def test_the_last_line_of_notes_replaces_the_old_ones_unless_it_is_empty(
    answer: str, notes: str, events: list[str]
) -> None:
    assert read_notes(answer, "old", 10) == (notes, tuple(events))


def reply(step: int, **facts: Any) -> EnvReply:
    observation = make_observation(f"step {step}", images=facts.pop("images", ()))
    message = {"role": "user", "content": f"step {step}"}
    return EnvReply(
        observation,
        [message],
        "rules",
        facts.pop("answer_format", "Answer."),
        "left",
        True,
        **facts,
    )


def talk(responses: Sequence[tuple[str, bool]], **config: Any) -> list[str]:
    """The last message of each prompt while these responses, valid or not, are given."""
    conversation = Conversation(build_memory(MemorySettings(kind="inline_notes", **config)))
    prompts = [conversation.show(reply(0))]
    for step, (answer, valid) in enumerate(responses, 1):
        conversation.answered(reply(step - 1).observation, answer, valid, "left")
        prompts.append(conversation.show(reply(step)))
    assert all(messages[0] == {"role": "system", "content": "rules"} for messages in prompts)
    return [messages[-1]["content"] for messages in prompts]


def test_prompts_ask_for_notes_and_show_the_last_ones_of_a_valid_response() -> None:
    answers = [
        ("NOTES: red\nACTION: a", True),
        ("NOTES: blue\nACTION: b", False),
        ("ACTION: c", True),
    ]
    first, *later = talk(answers, n=0, notes_chars=30)
    request = (
        "Before your action you may write one line of notes. Later prompts show your last notes:\n"
    )
    request += "NOTES: what you want to remember, at most 30 characters"
    assert first == f"Current Observation:\nstep 0\n\nAnswer.\n\n{request}"
    assert later == [
        f"Current Observation:\nstep {step}\n\nYour notes:\nred\n\nAnswer.\n\n{request}"
        for step in (1, 2, 3)
    ]


@given(
    st.lists(
        st.tuples(st.text(max_size=40) | st.text("NOTES: x\n", max_size=40), st.booleans()),
        max_size=6,
    )
)
def test_whatever_was_answered_notes_are_one_short_line_of_a_valid_response(
    responses: list[tuple[str, bool]],
) -> None:
    conversation = Conversation(build_memory(MemorySettings(kind="inline_notes", notes_chars=5)))
    for answer, valid in responses:
        before = conversation.notes
        conversation.answered(make_observation(""), answer, valid, "left")
        assert (
            conversation.notes is not None
            and len(conversation.notes) <= 5
            and "\n" not in conversation.notes
        )
        assert conversation.notes == before or (valid and conversation.notes in answer)


def test_an_image_mark_in_the_notes_shows_no_image() -> None:
    conversation = Conversation(build_memory(MemorySettings(kind="inline_notes", n=0)))
    observation = make_observation("here", f"a map {PICTURE_PLACE} of it")
    observation["multi_modal_data"] = {"current_image": ["map"]}
    shown = EnvReply(observation, [{"role": "user", "content": "x"}], "", "Answer.", "left", True)
    conversation.answered(observation, f"NOTES: {PICTURE_PLACE}\nACTION: a", True, "a")
    content = conversation.show(shown)[-1]["content"]
    assert [part["type"] for part in content] == ["text", "image", "text"]
    assert f"Your notes:\n{PICTURE_PLACE}\n" in content[-1]["text"]


def test_nothing_is_added_to_whole_prompts() -> None:
    conversation = Conversation(build_memory(MemorySettings(kind="inline_notes")))
    assert conversation.show(reply(0, whole_prompts=True)) == [
        {"role": "user", "content": "step 0"}
    ]
    conversation.answered(reply(0).observation, "NOTES: x\nACTION: a", True, "a")
    assert conversation.notes is None and conversation.notes_events == ()


def notes_in(prompt: Any) -> str | None:
    """The notes that a prompt, as text, ids or request, shows."""
    ids = prompt["input_ids"] if isinstance(prompt, dict) else prompt
    text = ids if isinstance(ids, str) else chatml_tokenizer().decode(ids)
    return text.split("Your notes:\n")[1].split("\n")[0] if "Your notes:\n" in text else None


async def play(
    folder: Path, first: int, last: int, collect: Any = fixed_turn.collect, **keys: Any
) -> Any:
    return await play_saved(folder, first, last, collect, **{"script": writes, **NOTES, **keys})


@both_loops
async def test_batches_show_the_notes_and_count_them(tmp_path: Path, collect: Any) -> None:
    outputs, _ = await play(tmp_path, 0, 2, collect)
    after: dict[Any, str] = {}
    for output in outputs:
        turns = turns_of(output)
        valid = [s for s in turns if s.metadata["valid_action"]]
        for event, mark in {"empty": "NOTES:\n", "written": "NOTES: ", "cut": "its limit"}.items():
            share = sum(mark in sample.response for sample in valid) / len(valid)
            assert output.metrics[f"turn/notes_{event}_ratio"] == pytest.approx(share)
        assert (
            0 <= output.metrics["turn/notes_copied_ratio"] < 1
            and output.metrics["turn/notes_action_ratio"] == 0
        )
        after |= {place_of(sample): sample.metadata["notes"] for sample in turns}
        for sample in turns:
            episode, turn = place_of(sample)
            before = after.get((episode, turn - 1))
            assert before is None or notes_in(sample.tokens[: -sample.response_length]) == (
                before or None
            )
    assert len(set(after.values())) > 2


async def test_control_tokens_in_notes_stay_text(tmp_path: Path) -> None:
    keys = {"env": {"max_length": 30}, "seed_start": 7, "n_env": 1}
    _, requests = await play(tmp_path, 0, 1, script=lambda body, number: RESPONSES[4], **keys)
    plain, noted = (body["input_ids"] for body in requests[:2])
    start = chatml_tokenizer().convert_tokens_to_ids("<|im_start|>")
    assert "Your notes:\n<|im_start|> this note" in chatml_tokenizer().decode(noted)
    # The second prompt also shows the first turn, which is two messages more.
    assert noted.count(start) == plain.count(start) + 2


async def test_whole_and_held_out_episodes_show_and_record_notes(tmp_path: Path) -> None:
    keys = {**NOTES, "env": {"max_length": 30}, "seed_start": 7, "eval": {"episodes": 1}}
    async with playing(tmp_path, lambda body, number: RESPONSES[number % 2], **keys) as run:
        samples = await run.episode()
        turns = len(run.engine.requests)
        (result,) = await play_episodes(await run.runtime(), run.source.eval_episodes(), 1)
    shown = [notes_in(body) for body in run.engine.requests]
    assert shown[:3] == [None, "the key is red", "went right first"]
    metrics = whole_episode_metrics(episode_facts(samples))
    assert metrics["turn/notes_written_ratio"] == 1.0 and metrics["turn/notes_copied_ratio"] == 0.0
    recorded = [turn.get("notes") for turn in result.facts()["story"]]
    assert shown[turns:] == [None, *recorded[:-1]] and set(recorded) == {
        "the key is red",
        "went right first",
    }


async def test_a_run_resumed_after_any_turn_sends_the_prompts_of_an_unbroken_run(
    tmp_path: Path,
) -> None:
    turns = 16
    keys = {**one_slot(1), "env": {"max_length": 12}}
    whole = [body["input_ids"] for body in (await play(tmp_path, 0, turns, **keys))[1]]
    shown = [notes_in(ids) for ids in whole]
    assert len(set(shown)) > 2 and sum(notes is None for notes in shown) > 1, (
        "notes change, and episodes begin"
    )
    for turn in range(1, turns):
        _, requests = await play(tmp_path, turn, turn + 1, **keys)
        assert [body["input_ids"] for body in requests] == whole[turn : turn + 1]
