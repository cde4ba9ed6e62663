"""The engine client: malformed answers are refused with the reason, faults are retried within
limits."""

import asyncio
import copy
import json
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from rollout.bridge.settings import EngineSettings
from rollout.errors import EngineError
from rollout.play.engine import EngineClient, parse_generation, read_json, request_body, write_json
from rollout.turn import Prompt
from rollout.workers.utilization import Utilization
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.scripted_engine import ScriptedEngine

FAST = EngineSettings(timeout_s=60.0, max_retries=2, backoff_s=0.01, backoff_max_s=0.02)
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


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "no meta_info"),
        (bad(finish_reason=None), "finish_reason must be stop, length or abort"),
        (bad(output_token_logprobs=[[float("nan"), 7], [-1.0, 8]]), r"\[0\] has log-prob nan"),
        (bad(output_token_logprobs=[[-1.0, "7"], [-1.0, 8]]), r"token id '7'"),
        (bad(output_token_logprobs=[[-1.0, 1 << 40], [-1.0, 8]]), r"token id 1099511627776"),
        (bad(output_token_logprobs=[None, [-1.0, 8]]), r"\[0\] is None"),
        (bad(weight_version={}), "weight versions"),
        (bad(completion_tokens=3), "completion_tokens is 3 but 2"),
        (bad(output_token_logprobs=[], completion_tokens=0), "no tokens"),
    ],
)
def test_a_malformed_answer_is_refused_with_the_reason(answer: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        parse_generation(answer)


def test_images_go_with_unexpanded_placeholders() -> None:
    body = json.loads(
        request_body(Prompt([1, 9, 9, 9, 2], ["base64"], {}, [1, 9, 2]), {"top_p": 1.0})
    )
    assert body == {
        "input_ids": [1, 9, 2],
        "image_data": ["base64"],
        "sampling_params": {"top_p": 1.0},
        "return_logprob": True,
    }


def test_requests_and_answers_hold_everything_that_python_writes_as_json() -> None:
    value = {"text": "\ud800 é🙂", "seed": 1 << 70, "logit_bias": {3: -1.0}}
    assert read_json(write_json(value)) == json.loads(json.dumps(value))
    assert read_json(b'{"x": -Infinity}') == {"x": -math.inf}


@pytest.mark.parametrize(
    ("meta", "versions"),
    [
        ({"weight_version": "8", "weight_versions": ["7", "8"]}, ("7", "8")),
        (
            {
                "weight_versions": [
                    {"version": 7, "start": 0, "end": 1},
                    {"version": 8, "start": 1, "end": 2},
                ]
            },
            ("7", "8"),
        ),
        ({}, ("4",)),
        ({"weight_version": None}, ()),
    ],
)
def test_an_answer_that_spans_a_weight_update_names_every_version(
    meta: Any, versions: tuple[str, ...]
) -> None:
    assert parse_generation(bad(**meta)).weight_versions == versions


@asynccontextmanager
async def client_of(
    script: Any, settings: EngineSettings = FAST
) -> AsyncIterator[tuple[EngineClient, ScriptedEngine]]:
    """A client of an engine with this script."""
    async with ScriptedEngine(chatml_tokenizer(), script) as engine:
        client = EngineClient(f"http://127.0.0.1:{engine.port}", settings)
        yield client, engine
        await client.close()


async def cut_off(request: web.Request) -> web.StreamResponse:
    """Announces a whole answer, sends half of it and cuts the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"text": "x", "meta_info": {')
    assert request.transport is not None
    request.transport.close()
    return response


FAULTS: dict[str, tuple[str, Any]] = {
    "HTTP 500": ("http_500", lambda: web.Response(status=500, text="CUDA out of memory")),
    "truncated JSON": ("bad_answer", lambda: web.Response(text='{"text": "x", "meta_in')),
    "wrong counts": ("bad_answer", lambda: web.json_response(bad(completion_tokens=9))),
    "nested too deep": ("bad_answer", lambda: web.Response(body=b'{"meta_info":' * 100_000)),
    "cut in the middle": ("connection_lost", cut_off),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_retried_and_counted_by_its_kind(fault: str) -> None:
    kind, answer = FAULTS[fault]
    async with client_of(lambda body, number: answer if number < 2 else "fine") as (client, _):
        assert (await client.generate(PROMPT, {})).text == "fine<|im_end|>"
        assert client.faults == {kind: 2}


REFUSALS: dict[int, tuple[Any, str, bool]] = {
    400: (
        {"error": {"message": "The input is longer than the model's context length"}},
        "longer than the model",
        True,
    ),
    404: ({"object": "error", "message": "no such model"}, "HTTP 404: no such model$", False),
    422: ("plain text", "HTTP 422: plain text$", False),
}


@pytest.mark.parametrize("status", REFUSALS)
async def test_a_refused_request_is_not_repeated_and_shows_the_engines_words(status: int) -> None:
    body, words, too_long = REFUSALS[status]
    refusal = lambda: web.json_response(body, status=status)
    async with client_of(lambda *_: refusal) as (client, engine):
        with pytest.raises(EngineError, match=words) as caught:
            await client.generate(PROMPT, {})
        assert len(engine.requests) == 1 and caught.value.too_long is too_long
        assert caught.value.concerns_prompt is (status in (400, 422))


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        ("0.3", 0.3, 0.3),
        ("1000", 60.0, 60.0),
        ("0", 0.005, 0.01),  # the usual pause
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.005, 0.01),
    ],
)
async def test_a_rate_limit_is_waited_for_as_long_as_the_server_asks_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, asked: str, least: float, most: float
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("rollout.play.engine.asyncio", SimpleNamespace(sleep=pause))
    limit = lambda: web.Response(status=429, headers={"Retry-After": asked})
    async with client_of(lambda _, number: limit if number == 0 else "fine") as (client, _):
        assert (await client.generate(PROMPT, {})).text == "fine<|im_end|>"
        assert client.faults == {"http_429": 1}
    assert len(pauses) == 1 and least <= pauses[0] <= most


async def test_an_engine_that_hangs_is_given_up_after_the_timeout() -> None:
    given_up = asyncio.Event()

    async def script(body: dict[str, Any], number: int) -> str:
        if number == 0:
            await given_up.wait()
        return "late"

    async with client_of(script, FAST.model_copy(update={"timeout_s": 2.0})) as (client, _):
        assert (await client.generate(PROMPT, {})).text == "late<|im_end|>"
        assert client.faults == {"timeout": 1}
        given_up.set()


async def test_a_refused_connection_ends_in_an_error_that_names_the_address() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        client = EngineClient(f"http://127.0.0.1:{port}", FAST)
        with pytest.raises(EngineError, match=f"127.0.0.1:{port}/generate failed 3 times"):
            await client.generate(PROMPT, {})
    assert client.faults == {"refused": 3}
    await client.close()


def test_retries_wait_longer_each_time_up_to_a_limit_and_never_all_at_once() -> None:
    client = EngineClient("http://127.0.0.1:1", EngineSettings(backoff_s=0.5, backoff_max_s=20.0))
    for attempt, ceiling in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]):
        delays = {client._delay(attempt) for _ in range(50)}
        assert ceiling / 2 <= min(delays) and max(delays) <= ceiling and len(delays) == 50


async def test_an_engine_that_restarts_with_other_weights_is_found_again() -> None:
    async with ScriptedEngine(chatml_tokenizer(), lambda body, number: "one") as engine:
        port = engine.port
        client = EngineClient(
            f"http://127.0.0.1:{port}", EngineSettings(max_retries=12, backoff_s=0.05)
        )
        assert (await client.generate(PROMPT, {})).weight_versions == ("1",)

    async def restart() -> ScriptedEngine:
        await asyncio.sleep(0.2)
        again = ScriptedEngine(chatml_tokenizer(), lambda body, number: "two")
        again.fixed_port, again.version = port, "2"
        return await again.__aenter__()

    server, generation = await asyncio.gather(restart(), client.generate(PROMPT, {}))
    assert (generation.text, generation.weight_versions) == ("two<|im_end|>", ("2",))
    await client.close()
    await server.__aexit__()


def test_utilization_counts_busy_seconds_and_request_seconds() -> None:
    now = 0.0
    utilization = Utilization(lambda: now)
    now += 1.0
    with utilization.request():
        now += 2.0
        with utilization.request():
            now += 3.0
        now += 4.0
    now += 5.0
    assert utilization.snapshot() == (15.0, 2.0 + 3.0 + 4.0, 2.0 + 2 * 3.0 + 4.0)
