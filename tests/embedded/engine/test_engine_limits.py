"""The embedded engine against clients that send invalid or huge requests."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from embedded.engine.server import EngineServer
from embedded.warmstart.policy import build_policy, save_policy
from tests.embedded.conftest import SIZE, serve
from tests.embedded.engine.test_engine import generate, get, post, until_waiting


def sampled(**params: Any) -> dict[str, Any]:
    return {"input_ids": [1], "sampling_params": params}


IMPOSSIBLE: list[tuple[str, Any, str]] = [
    ("/generate", [1, 2], "JSON object"),
    ("/generate", {"text": "x"}, "does not support text"),
    ("/generate", {"input_ids": [1, 2.5]}, "list of integers"),
    ("/generate", {"input_ids": []}, "empty"),
    ("/generate", {"input_ids": [1, -1]}, "input_ids has token -1"),
    ("/generate", {"input_ids": [1] * 300}, "exceed the context of 256"),
    ("/generate", {"input_ids": [1], "rid": [5]}, "rid must be"),
    ("/generate", sampled(topk=1), "did you mean"),
    ("/generate", sampled(n=4), "sampling_params.n"),
    ("/generate", sampled(stop="x"), "sampling_params.stop"),
    ("/generate", sampled(logit_bias={"1000000": 1.0}), "logit_bias has token 1000000"),
    ("/abort_request", {}, "needs a rid"),
    ("/pause_generation", {"mode": ["abort"]}, "mode must be"),
    ("/update_weights_from_disk", {"model_path": "a\0b"}, "model_path must be"),
]


@pytest.mark.parametrize(
    ("path", "body", "said"), IMPOSSIBLE, ids=[f"{k}-{c[2]}" for k, c in enumerate(IMPOSSIBLE)]
)
async def test_an_impossible_request_is_refused_and_the_engine_goes_on(
    server: EngineServer, path: str, body: Any, said: str
) -> None:
    status, answer = await post(server, path, body)
    assert status == 400
    assert said in answer["error"]["message"] and len(answer["error"]["message"]) <= 2000
    assert (await generate(server, [1, 2, 3]))["output_ids"]


RAW = {
    "cut": b'{"input_ids": [1',
    "deep prompt": b'{"input_ids": ' + b"[" * 900 + b"]" * 900 + b"}",
    "many bytes": b'{"input_ids": [' + b"1," * (5 << 20) + b"1]}",
}


@pytest.mark.parametrize("name", RAW)
async def test_a_body_that_is_cut_deep_or_large_is_refused(server: EngineServer, name: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + "/generate", data=RAW[name]) as response,
    ):
        assert response.status == (413 if name == "many bytes" else 400)
    assert (await get(server, "/health"))[0] == 200


async def test_loading_weights_leaves_the_loop_free_and_requests_wait_for_the_new_ones(
    policy_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    save_policy(build_policy(tokenizer, SIZE, seed=9), tokenizer, tmp_path)
    with serve(policy_folder) as server:
        began, go_on, load = (
            threading.Event(),
            threading.Event(),
            server.engine.decoder.load_weights,
        )

        def slow(state: Any) -> None:
            began.set()
            assert go_on.wait(60)
            load(state)

        server.engine.decoder.load_weights = slow
        body = {"model_path": str(tmp_path), "weight_version": "1"}
        update = asyncio.create_task(post(server, "/update_weights_from_disk", body))
        await asyncio.to_thread(began.wait, 60)
        asked = asyncio.create_task(generate(server, [1, 2, 3]))
        await until_waiting(server, 1)
        assert (await get(server, "/health"))[0] == 200
        go_on.set()
        assert (await update)[1]["success"]
        assert (await asked)["meta_info"]["weight_version"] == "1"
