"""Turns cross the connection in compact form and arrive as they were; prompts of a conversation
share memory."""

import pickle
from array import array
from dataclasses import replace
from typing import Any

import torch

from rollout.players.wire import NOTHING, changed_prompt, dumps, prompt_change
from rollout.tokens.token_prefix import TokenPrefix
from rollout.turn import FinishReason, Generation, ImageChain, Prompt, Span, Turn


def over(value: Any) -> Any:
    return pickle.loads(dumps(value))


def test_turns_of_a_growing_conversation_arrive_as_they_were_in_few_bytes_and_share_their_memory() -> (
    None
):
    first = Prompt(TokenPrefix(range(1400)))
    second = Prompt(first.token_ids.extended([5, 6], [7]), seen_tool=True)
    ids, log_probs = TokenPrefix(range(1000, 1150)), array("f", [-0.5] * 150)
    generation = Generation(ids, log_probs, "text", FinishReason.STOP, ("3",), {"cached_tokens": 7})
    spans = (Span("engine", 1.0, 2.0, {"a": 1}, (Span("tool", 1.0, 1.5),)),)
    before, shown, sizes = NOTHING, NOTHING, []
    for prompt in (first, second):
        turn = Turn(
            7, 3, prompt, generation, "left", True, "left", 0.5, False, True, (1, 2), spans=spans
        )
        frame = dumps((turn, prompt_change(before, prompt)))
        arrived, change = pickle.loads(frame)
        before, shown, previous = prompt, changed_prompt(shown, change), shown
        assert replace(arrived, prompt=shown) == turn
        assert isinstance(arrived.generation.token_ids, TokenPrefix)
        assert isinstance(arrived.generation.log_probs, array)
        sizes.append(len(frame))
    assert shown.token_ids._buffer is previous.token_ids._buffer
    assert sizes[0] < 4 * (1400 + 2 * 150) + 800 and sizes[1] < 4 * 2 * 150 + 800


def test_images_that_the_previous_prompt_showed_are_not_sent_again() -> None:
    parts = [
        {"pixels": torch.arange(6.0).reshape(2, 3)},
        {"pixels": torch.ones(2, 3, dtype=torch.bfloat16)},
    ]
    old = Prompt(TokenPrefix([1, 2]), ["one", "two"], ImageChain(parts), engine_ids=[1, 9])
    new = Prompt(
        TokenPrefix([3]),
        [old.image_data[1], "three"],
        ImageChain([parts[1], parts[0]]),
        engine_ids=[9],
    )
    here = changed_prompt(NOTHING, over(prompt_change(NOTHING, old)))
    change = over(prompt_change(old, new))
    assert change.images == [1, "three"] and change.inputs == [1, 0]
    there = changed_prompt(here, change)
    assert there.image_data == ["two", "three"] and list(there.engine_ids or ()) == [9]
    assert here.train_inputs is not None and there.train_inputs is not None
    assert there.train_inputs.parts[1] is here.train_inputs.parts[0]
    assert torch.equal(here.train_inputs.parts[0]["pixels"], parts[0]["pixels"])
    assert torch.equal(here.train_inputs.parts[1]["pixels"], parts[1]["pixels"])
