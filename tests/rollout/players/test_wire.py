"""Turns cross the connection in compact form and arrive as they were; prompts of a conversation share memory."""

import asyncio
import pickle
import socket
from array import array
from typing import Any

import torch

from rollout.players.wire import NOTHING, Link, changed_prompt, dumps, prompt_change, read_turn, turn_values
from rollout.tokens.token_prefix import TokenPrefix
from rollout.turn import FinishReason, Generation, ImageChain, Prompt, Span, Turn


def over(value: Any) -> Any:
    return pickle.loads(dumps(value))


async def test_what_an_end_reports_is_not_lost_with_a_message_that_cannot_be_pickled() -> None:
    reports, frames = iter(["new", None]), asyncio.Queue[Any]()
    sender = Link(lambda *_: None, lambda: None, lambda: next(reports))
    receiver = Link(lambda *frame: frames.put_nowait(frame), lambda: None)
    for link, end in zip((sender, receiver), socket.socketpair(), strict=True):
        await asyncio.get_running_loop().create_connection(lambda link=link: link, sock=end)
    sender.send((1, True, "fine"))
    sender.send((2, True, lambda: None))
    (fine, refused), report = await frames.get()
    assert fine == (1, True, "fine") and refused[:2] == (2, False) and "cannot be pickled" in str(refused[2])
    assert report == "new"
    sender.abort()
    receiver.abort()


def test_turns_of_a_growing_conversation_arrive_as_they_were_in_few_bytes_and_share_their_memory() -> None:
    first = Prompt(TokenPrefix(range(1400)))
    second = Prompt(first.token_ids.extended([5, 6], [7]), seen_tool=True)
    ids, log_probs = TokenPrefix(range(1000, 1150)), array("f", [-0.5] * 150)
    generation = Generation(ids, log_probs, "text", FinishReason.STOP, ("3",), {"cached_tokens": 7})
    spans = (Span("engine", 1.0, 2.0, {"a": 1}, (Span("tool", 1.0, 1.5),)),)
    before, shown, sizes = NOTHING, NOTHING, []
    for prompt in (first, second):
        turn = Turn(7, 3, prompt, generation, "left", True, "left", 0.5, False, True, (1, 2), spans=spans)
        frame = dumps((turn_values(turn), prompt_change(before, prompt)))
        values, change = pickle.loads(frame)
        before, shown, previous = prompt, changed_prompt(shown, change), shown
        assert read_turn(values, shown) == turn
        assert isinstance(values[3].token_ids, TokenPrefix) and isinstance(values[3].log_probs, array)
        sizes.append(len(frame))
    assert shown.token_ids._buffer is previous.token_ids._buffer
    assert sizes[0] < 4 * (1400 + 2 * 150) + 800 and sizes[1] < 4 * 2 * 150 + 800


def test_images_that_the_previous_prompt_showed_are_not_sent_again() -> None:
    parts = [{"pixels": torch.arange(6.0).reshape(2, 3)}, {"pixels": torch.ones(2, 3, dtype=torch.bfloat16)}]
    old = Prompt(TokenPrefix([1, 2]), ["one", "two"], ImageChain(parts), engine_ids=[1, 9])
    new = Prompt(TokenPrefix([3]), [old.image_data[1], "three"], ImageChain([parts[1], parts[0]]), engine_ids=[9])
    here = changed_prompt(NOTHING, over(prompt_change(NOTHING, old)))
    change = over(prompt_change(old, new))
    assert change.images == [1, "three"] and change.inputs == [1, 0]
    there = changed_prompt(here, change)
    assert there.image_data == ["two", "three"] and list(there.engine_ids or ()) == [9]
    assert here.train_inputs is not None and there.train_inputs is not None
    assert there.train_inputs.parts[1] is here.train_inputs.parts[0]
    assert torch.equal(here.train_inputs.parts[0]["pixels"], parts[0]["pixels"])
    assert torch.equal(here.train_inputs.parts[1]["pixels"], parts[1]["pixels"])
