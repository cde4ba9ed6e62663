"""A running engine is told to abort, to pause and to load new weights, and answers those who poll
it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded.engine.decoder import load_hf_model
from embedded.engine.server import EngineServer
from embedded.warmstart.policy import build_policy, save_policy
from rollout.play.engine import parse_generation
from tests.embedded.conftest import SIZE, serve, sharpen
from tests.embedded.engine.test_engine import (
    generate,
    get,
    post,
    prompts,
    reference_log_probs,
    until_waiting,
)


async def test_an_aborted_request_returns_the_tokens_it_has(policy_folder: Path) -> None:
    with serve(policy_folder, at_once=2) as server:
        decode, steps = server.engine.decoder.decode, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow_decode(*args: Any) -> torch.Tensor:
            loop.call_soon_threadsafe(steps.set)
            return decode(*args)

        server.engine.decoder.decode = slow_decode
        body = {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        asked = [
            asyncio.create_task(
                post(server, "/generate", {**body, "input_ids": [1, 2, i], "rid": f"r{i}"})
            )
            for i in range(3)
        ]
        await steps.wait()
        assert (await post(server, "/abort_request", {"rid": "r0"}))[0] == 200
        first = (await asked[0])[1]
        assert (await post(server, "/abort_request", {"abort_all": True}))[0] == 200
        rest = [(await task)[1] for task in asked[1:]]
        for answer in [first, *rest]:
            meta = answer["meta_info"]
            assert meta["finish_reason"]["type"] == "abort"
            assert meta["completion_tokens"] == len(answer["output_ids"]) < 200
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        assert first["output_ids"]
        assert parse_generation(first).finish_reason == "abort"
        assert (await generate(server, [1, 2, 3]))["output_ids"]


async def test_a_paused_request_continues_where_it_stopped(server: EngineServer) -> None:
    ids, params = (
        prompts(1, seed=4)[0],
        {"sampling_seed": 5, "max_new_tokens": 150, "ignore_eos": True},
    )
    whole = await generate(server, ids, **params)
    task = asyncio.create_task(generate(server, ids, **params))
    while server.engine.scheduler.load()["num_running_reqs"] == 0 and not task.done():
        await asyncio.sleep(0)
    assert (await post(server, "/pause_generation", {"mode": "retract"}))[0] == 200
    await asyncio.sleep(0.05)
    assert (await post(server, "/continue_generation", {}))[0] == 200
    assert (await task)["output_ids"] == whole["output_ids"]


async def test_new_weights_raise_the_version_and_are_served(
    policy_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    other = sharpen(build_policy(tokenizer, SIZE, seed=9))
    save_policy(other, tokenizer, tmp_path)
    ids = prompts(1)[0]
    with serve(policy_folder) as server:
        before = await generate(server, ids, sampling_seed=1)
        assert server.engine.scheduler.update_weights(other.state_dict(), "1").result(600) == "1"
        after = await generate(server, ids, sampling_seed=1)
        assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == (
            "default",
            "1",
        )
        assert after["meta_info"]["cached_tokens"] == 0
        found = [entry[0] for entry in after["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(
            reference_log_probs(other, ids, after["output_ids"], 1.0), abs=1e-4
        )
        body = {"model_path": str(policy_folder), "weight_version": "step-7"}
        assert (await post(server, "/update_weights_from_disk", body))[1]["success"]
        assert (await get(server, "/get_weight_version"))[1] == {"weight_version": "step-7"}
        again = await generate(server, ids, sampling_seed=1)
        assert again["output_ids"] == before["output_ids"]
        assert again["meta_info"]["weight_version"] == "step-7"
        assert server.engine.scheduler.update_weights(other.state_dict()).result(600) == "step-7", (
            "as in SGLang"
        )


async def test_a_retracted_request_goes_on_with_the_new_weights_and_says_which_wrote_what(
    policy_folder: Path, tokenizer: Any
) -> None:
    torch.manual_seed(5)
    weights = {
        "default": load_hf_model(policy_folder),
        "1": sharpen(build_policy(tokenizer, SIZE, seed=9)),
    }
    asked = prompts(3)
    with serve(policy_folder, at_once=2) as server:
        decode, steps, loop = (
            server.engine.decoder.decode,
            asyncio.Queue[int](),
            asyncio.get_running_loop(),
        )
        halted = threading.Event()

        def slow_decode(*args: Any) -> torch.Tensor:
            loop.call_soon_threadsafe(steps.put_nowait, 1)
            if steps.qsize() >= 9:
                halted.wait(60)
            return decode(*args)

        server.engine.decoder.decode = slow_decode
        tasks = [
            asyncio.create_task(generate(server, ids, max_new_tokens=30, ignore_eos=True))
            for ids in asked
        ]
        while steps.qsize() < 9:
            await asyncio.sleep(0.01)
        server.engine.scheduler.pause("retract")
        halted.set()
        while (await get(server, "/flush_cache"))[0] == 400:
            await asyncio.sleep(0.01)
        assert (
            server.engine.scheduler.update_weights(weights["1"].state_dict(), "1").result(600)
            == "1"
        )
        server.engine.scheduler.resume()
        answers = await asyncio.gather(*tasks)
    for ids, answer in zip(asked, answers, strict=True):
        output, meta = answer["output_ids"], answer["meta_info"]
        assert (
            len(output) == 30
            and meta["weight_version"] == "1"
            and meta["finish_reason"]["type"] == "length"
        )
        expected = {
            name: reference_log_probs(model, ids, output, 1.0) for name, model in weights.items()
        }
        spans = {
            span["version"]: range(span["start"], span["end"]) for span in meta["weight_versions"]
        }
        assert sorted(position for span in spans.values() for position in span) == list(range(30))
        for version, span in spans.items():
            found = [meta["output_token_logprobs"][position][0] for position in span]
            assert found == pytest.approx(
                [expected[version][position] for position in span], abs=1e-4
            )
    assert [len(parse_generation(answer).weight_versions) for answer in answers] == [2, 2, 1], (
        "the third had to wait"
    )


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    server: EngineServer, tokenizer: Any, tmp_path: Path
) -> None:
    ids = prompts(1)[0]
    before = await generate(server, ids, sampling_seed=2)
    status, answer = await post(
        server, "/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")}
    )
    assert status == 400 and not answer["success"] and "no config.json" in answer["message"]
    deeper = type(SIZE)(layers=3, hidden=32, heads=4, kv_heads=2, ffn=64, context=256)
    save_policy(build_policy(tokenizer, deeper), tokenizer, tmp_path)
    status, answer = await post(server, "/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert status == 400 and "another model" in answer["message"]
    after = await generate(server, ids, sampling_seed=2)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == before["meta_info"]["weight_version"]


async def test_a_client_that_disconnects_frees_its_place(policy_folder: Path) -> None:
    with serve(policy_folder, at_once=1) as server:
        server.engine.scheduler.pause("retract")
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
        left, other = (
            asyncio.create_task(post(server, "/generate", {**body, "rid": rid}))
            for rid in ("1", "10")
        )
        await until_waiting(server, 2)
        left.cancel()
        await until_waiting(server, 1)
        server.engine.scheduler.resume()
        answer = (await other)[1]
        assert len(answer["output_ids"]) == 20, "a request whose id begins alike goes on"


async def test_the_endpoints_that_a_trainer_polls_answer(server: EngineServer) -> None:
    assert (await get(server, "/health_generate"))[0] == 200
    assert (await get(server, "/server_info"))[1]["tp_size"] == 1
    assert (await get(server, "/v1/loads?include=core"))[1]["loads"][0]["num_running_reqs"] == 0
    assert (await get(server, "/workers"))[1]["workers"][0]["url"] == server.url
