"""Large observations are cut in the worker with a note, counted, and encoded off the event loop."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import make_observation
from envs.plain_text import LONG_CHARS, PlainText
from rollout.spec import ObservationLimits
from rollout.workers.reply import cut_messages, cut_observation, cut_text
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import playing
from tests.fixtures.vision import picture
from tests.rollout.test_evaluate import left
from tests.rollout.workers.test_env_pool import pool_of, spec

MEGABYTE = 1_000_000


@given(text=st.text(), chars=st.integers(1, 30))
def test_a_cut_text_keeps_both_ends_and_says_how_much_is_missing(text: str, chars: int) -> None:
    cut = cut_text(text, chars)
    if len(text) <= chars:
        assert cut == text
        return
    head, note, tail = cut.partition(f"\n[... {len(text) - chars:,} characters left out ...]\n")
    assert note and len(head) + len(tail) == chars
    assert text.startswith(head) and text.endswith(tail)


def test_the_messages_of_one_observation_share_its_limits() -> None:
    limits = ObservationLimits(chars=100, images=2)
    images = [{"type": "image", "image": picture(k)} for k in range(4)]
    messages = [
        {"role": "tool", "content": "a" * 500, "tool_call_id": "x"},
        {"role": "tool", "content": "short"},
        {"role": "user", "content": [*images, {"type": "text", "text": "b" * 500}]},
    ]
    first, second, third = cut_messages(messages, limits)
    assert (
        "left out" in first["content"]
        and first["tool_call_id"] == "x"
        and second["content"] == "short"
    )
    shown = [part["image"] for part in third["content"] if part["type"] == "image"]
    assert shown == [image["image"] for image in images[:2]]
    assert third["content"][-1]["text"] == "\n[2 more pictures left out]"
    assert first["content"].count("a") + third["content"][2]["text"].count("b") <= 100
    assert cut_messages(messages[1:2], limits) == messages[1:2]


def test_an_observation_keeps_its_first_pictures_and_says_that_there_were_more() -> None:
    observation = make_observation("a door", images=[picture(k) for k in range(5)])
    cut = cut_observation(observation, ObservationLimits(100, images=3))
    assert len(cut["multi_modal_data"]["image"]) == 3
    assert (
        cut["text"]["long_term_context"] == cut["obs_str"] == "a door\n[2 more pictures left out]"
    )
    assert cut_observation(observation, ObservationLimits(100, images=5)) is observation


@pytest.mark.parametrize("backend", ["inline", "process"])
async def test_a_megabyte_is_cut_in_the_worker_and_replays_to_the_same(
    backend: str, tmp_path: Path
) -> None:
    once = {"raise_at": 2, "once": str(tmp_path / "done")}
    with pool_of(backend, max_observation_chars=2000) as pool:
        session = await pool.open(spec(show=MEGABYTE, **once))
        for k in range(4):
            reply = await session.step("ACTION: " + ("left", "right")[k % 2])
            text = reply.observation["text"]["long_term_context"]
            assert len(text) < 2100 and "characters left out" in text and text.startswith("seed 3")
            assert all(len(message["content"]) < 2100 for message in reply.messages)
        assert pool.faults["observation_cut"] == 5 and pool.faults["replayed"] == 1


@pytest.mark.parametrize("history", some(["window", "full"], ["full"]))
async def test_observations_of_a_megabyte_neither_stop_a_batch_nor_hold_the_loop(
    tmp_path: Path, history: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders: set[threading.Thread] = set()
    encode = PlainText._encode

    def watched(self: PlainText, text: str) -> Any:
        if len(text) > LONG_CHARS:
            encoders.add(threading.current_thread())
        return encode(self, text)

    monkeypatch.setattr(PlainText, "_encode", watched)
    keys = {
        "rollout_max_context_len": 400_000,
        "history": history,
        "rollout_batch_size": 8,
        "n_env": 2,
    }
    gaps: list[float] = []
    async with playing(tmp_path, left, env={"show": MEGABYTE, "max_length": 3}, **keys) as run:
        ticks = asyncio.create_task(_record_gaps(gaps))
        output = await run.batch()
        ticks.cancel()
    assert output.metrics["rollout/turns"] == 8
    assert output.metrics["rollout/faults/env_observation_cut"] >= 8
    assert max(gaps) < 0.25, "the loop was held by what it encoded"
    assert encoders and threading.current_thread() not in encoders
    for request in run.engine.requests:
        assert "characters left out" in chatml_tokenizer().decode(request["input_ids"])


async def _record_gaps(gaps: list[float]) -> None:
    """Append the CPU seconds between two iterations of the event loop, repeatedly."""
    while True:
        began = time.thread_time()
        await asyncio.sleep(0.001)
        gaps.append(time.thread_time() - began)
