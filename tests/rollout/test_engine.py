"""The engine client: nonsense is refused by name, faults are retried within bounds."""

from __future__ import annotations

import asyncio
import copy
import socket
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import EngineConfig
from rollout.engine import EngineClient, parse_generation, request_payload
from rollout.errors import EngineError
from rollout.turn import Prompt
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.scripted_engine import ScriptedEngine

FAST = EngineConfig(timeout_s=0.5, max_retries=2, backoff_s=0.01, backoff_max_s=0.02)
PROMPT = Prompt([1, 2, 3])
GOOD: dict[str, Any] = {
    "text": "hi",
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "completion_tokens": 2,
        "weight_version": 4,
    },
}


def bad(**meta: Any) -> dict[str, Any]:
    answer = copy.deepcopy(GOOD)
    answer["meta_info"].update(meta)
    return answer


def test_a_good_answer_keeps_tokens_log_probs_and_weight_version() -> None:
    generation = parse_generation(GOOD)
    assert (generation.token_ids, generation.log_probs) == ([7, 8], [-0.5, -0.25])
    assert (generation.finish_reason, generation.weight_versions) == ("stop", ("4",))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "no meta_info"),
        ({"meta_info": None}, "no meta_info"),
        (bad(finish_reason=None), "finish_reason must be stop, length or abort"),
        (bad(output_token_logprobs=None), "return_logprob"),
        (bad(output_token_logprobs=[[float("nan"), 7], [-1.0, 8]]), r"\[0\] has log-prob nan"),
        (bad(output_token_logprobs=[[-1.0, 7], [0.5, 8]]), r"\[1\] has log-prob 0.5"),
        (bad(output_token_logprobs=[[-1.0, "7"], [-1.0, 8]]), r"token id '7'"),
        (bad(output_token_logprobs=[[-1.0, -7], [-1.0, 8]]), r"token id -7"),
        (bad(output_token_logprobs=[None, [-1.0, 8]]), r"\[0\] is None"),
        (bad(completion_tokens=3), "completion_tokens is 3 but 2"),
        (bad(output_token_logprobs=[], completion_tokens=0), "no tokens"),
        ({**GOOD, "text": None}, "no text"),
    ],
)
def test_a_nonsense_answer_is_refused_with_what_is_wrong(answer: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        parse_generation(answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["meta_info", "text", "finish_reason", "type", "output_token_logprobs"]), inner, max_size=4
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_answer_is_either_taken_or_refused_by_name(answer: Any) -> None:
    try:
        parse_generation(answer)
    except EngineError as error:
        assert str(error)


def test_images_go_with_unexpanded_placeholders() -> None:
    payload = request_payload(Prompt([1, 9, 9, 9, 2], ["base64"], {}, [1, 9, 2]), {"top_p": 1.0})
    assert payload["input_ids"] == [1, 9, 2] and payload["image_data"] == ["base64"]


FAULTS: dict[str, Any] = {
    "HTTP 500": lambda: web.Response(status=500, text="CUDA out of memory"),
    "HTTP 503": lambda: web.Response(status=503),
    "truncated JSON": lambda: web.Response(text='{"text": "x", "meta_in'),
    "wrong counts": lambda: web.json_response(bad(completion_tokens=9)),
    "not JSON": lambda: web.Response(body=b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_retried_and_counted(fault: str) -> None:
    def script(body: dict[str, Any], number: int) -> Any:
        return FAULTS[fault]() if number < 2 else "fine"

    async with ScriptedEngine(chatml_tokenizer(), script) as engine:
        client = EngineClient(f"http://127.0.0.1:{engine.port}", FAST)
        assert (await client.generate(PROMPT, {})).text == "fine<|im_end|>"
        assert sum(client.faults.values()) == 2
        await client.close()


async def test_an_engine_that_hangs_is_given_up_after_the_timeout() -> None:
    async with ScriptedEngine(chatml_tokenizer(), lambda body, number: "late") as engine:
        engine.delay = lambda number: 2.0 if number == 0 else 0.0
        client = EngineClient(f"http://127.0.0.1:{engine.port}", FAST)
        assert (await client.generate(PROMPT, {})).text == "late<|im_end|>"
        assert client.faults["TimeoutError"] == 1
        await client.close()


async def test_a_refused_connection_ends_in_an_error_that_names_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = EngineClient(f"http://127.0.0.1:{port}", FAST)
    with pytest.raises(EngineError, match=f"127.0.0.1:{port}/generate failed 3 times"):
        await client.generate(PROMPT, {})
    await client.close()


async def test_an_engine_that_restarts_is_found_again() -> None:
    async with ScriptedEngine(chatml_tokenizer(), lambda body, number: "one") as engine:
        port = engine.port
        client = EngineClient(f"http://127.0.0.1:{port}", EngineConfig(timeout_s=1, max_retries=8, backoff_s=0.05))
        await client.generate(PROMPT, {})

    async def restart() -> ScriptedEngine:
        await asyncio.sleep(0.2)
        again = ScriptedEngine(chatml_tokenizer(), lambda body, number: "two")
        again.fixed_port = port
        return await again.__aenter__()

    server, generation = await asyncio.gather(restart(), client.generate(PROMPT, {}))
    assert generation.text == "two<|im_end|>"
    await client.close()
    await server.__aexit__()


async def test_the_load_counts_time_with_a_request_in_flight() -> None:
    async with ScriptedEngine(chatml_tokenizer(), lambda body, number: "x") as engine:
        engine.delay = lambda number: 0.1
        client = EngineClient(f"http://127.0.0.1:{engine.port}", FAST)
        before = client.load.snapshot()
        await asyncio.gather(*(client.generate(PROMPT, {}) for _ in range(4)))
        await asyncio.sleep(0.1)
        passed, busy, requests = client.load.since(before)
        assert busy < passed - 0.05 and requests > 2.5 * busy
        await client.close()
