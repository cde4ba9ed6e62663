"""The embedded engine answers like SGLang, with the log-probabilities of transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from embedded.engine.engine import EngineOptions
from embedded.engine.server import EngineServer, main
from embedded.warmstart.policy import build_policy, save_policy
from rollout.engine import parse_generation
from rollout.errors import ConfigError, EngineError
from tests.embedded.conftest import SIZE, sharpen

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


async def post(server: EngineServer, path: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(server.url + path, json=body) as response:
        text = await response.text()
        return response.status, await response.json() if text.startswith(("{", "[")) else text


async def get(server: EngineServer, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(server.url + path) as response:
        return response.status, await response.json() if response.content_type == "application/json" else None


async def generate(server: EngineServer, ids: list[int], **params: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 12, **params}, "return_logprob": True}
    status, answer = await post(server, "/generate", body)
    assert status == 200, answer
    return answer


def prompts(count: int, shared: int = 20, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(250) for _ in range(shared)]
    return [head + [rng.randrange(250) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def reference_log_probs(model: Any, ids: list[int], output: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[torch.arange(len(output)), output].tolist()


@pytest.mark.parametrize("shape", ["qwen2", "qwen2 tied", "llama", "qwen3"])
async def test_log_probs_of_concurrent_requests_are_those_of_transformers(
    shape: str, tokenizer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    shape_and_vocab = {**SHAPE, "vocab_size": 384, "eos_token_id": tokenizer.eos_token_id}
    if shape.startswith("qwen2"):
        model = build_policy(tokenizer, SIZE)
        model.config.tie_word_embeddings = shape.endswith("tied")
        model = type(model)(model.config)
    elif shape == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape_and_vocab, rope_parameters=LLAMA3_ROPE))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape_and_vocab, head_dim=24))
    save_policy(sharpen(model), tokenizer, tmp_path)
    asked = prompts(24)
    with EngineServer(EngineOptions(model_path=str(tmp_path), max_running_requests=8)) as server:
        answers = await asyncio.gather(*(generate(server, ids, temperature=0.7, ignore_eos=True) for ids in asked))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for ids, answer in zip(asked, answers, strict=True):
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert answer["meta_info"]["completion_tokens"] == 12
        assert found == pytest.approx(reference_log_probs(model, ids, answer["output_ids"], 0.7), abs=1e-4)
    assert any(answer["meta_info"]["cached_tokens"] >= 20 for answer in answers)


async def test_an_answer_does_not_depend_on_concurrent_requests(server: EngineServer) -> None:
    asked = prompts(20, seed=3)
    together = await asyncio.gather(*(generate(server, ids, seed=i) for i, ids in enumerate(asked)))
    for i in reversed(range(20)):
        alone = await generate(server, asked[i], sampling_seed=i)
        assert alone["output_ids"] == together[i]["output_ids"]


async def test_greedy_answers_take_the_likeliest_token(server: EngineServer, policy_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    ids = prompts(1)[0]
    output = (await generate(server, ids, temperature=0.0, ignore_eos=True))["output_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
    assert output == logits.argmax(-1).tolist()


async def test_the_rollout_client_accepts_the_answer(server: EngineServer) -> None:
    generation = parse_generation(await generate(server, prompts(1)[0]))
    assert generation.finish_reason in ("stop", "length")
    assert generation.weight_versions == ("0",)


async def test_cached_tokens_count_what_was_not_computed_again(policy_folder: Path) -> None:
    with EngineServer(EngineOptions(model_path=str(policy_folder))) as server:
        ids = prompts(1)[0]
        first = await generate(server, ids, seed=1)
        again = await generate(server, ids, seed=1)
        longer = await generate(server, ids + first["output_ids"] + [5, 6])
        assert first["meta_info"]["cached_tokens"] == 0
        assert again["meta_info"]["cached_tokens"] == len(ids) - 1
        assert again["output_ids"] == first["output_ids"]
        # The last drawn token was never fed back, so its keys are not in the cache.
        assert longer["meta_info"]["cached_tokens"] == len(ids) + len(first["output_ids"]) - 1
        assert (await get(server, "/flush_cache"))[0] == 200
        assert (await generate(server, ids))["meta_info"]["cached_tokens"] == 0


async def test_a_batch_in_one_request_gives_a_list_in_order(server: EngineServer) -> None:
    asked = prompts(3)
    status, answers = await post(
        server, "/generate", {"input_ids": asked, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    )
    assert status == 200
    for ids, answer in zip(asked, answers, strict=True):
        assert answer["meta_info"]["prompt_tokens"] == len(ids)
        assert answer["output_ids"] == (await generate(server, ids, temperature=0, max_new_tokens=4))["output_ids"]


async def test_text_prompts_are_tokenized_by_the_engine(server: EngineServer, tokenizer: Any) -> None:
    text = "go to the red ball"
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    _, answer = await post(server, "/generate", body)
    assert (
        answer["output_ids"]
        == (await generate(server, tokenizer.encode(text), temperature=0, max_new_tokens=4))["output_ids"]
    )


async def test_stop_ids_and_stop_strings_end_an_answer_and_are_trimmed_unless_asked_for(server: EngineServer) -> None:
    ids, greedy = prompts(1, seed=8)[0], {"temperature": 0, "ignore_eos": True, "max_new_tokens": 30}
    free = await generate(server, ids, **greedy)
    stop_id = free["output_ids"][6]
    cut = free["output_ids"][: free["output_ids"].index(stop_id) + 1]
    stopped = await generate(server, ids, **greedy, stop_token_ids=[stop_id])
    assert stopped["output_ids"] == cut
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    word = free["text"][3:6]
    trimmed = await generate(server, ids, **greedy, stop=word)
    kept = await generate(server, ids, **greedy, stop=[word], no_stop_trim=True)
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert trimmed["text"] == free["text"][: free["text"].find(word)]
    assert word in kept["text"] and trimmed["output_ids"] == kept["output_ids"]
    assert free["meta_info"]["finish_reason"] == {"type": "length", "length": 30}


async def test_an_aborted_request_returns_the_tokens_it_has(policy_folder: Path) -> None:
    with EngineServer(EngineOptions(model_path=str(policy_folder), max_running_requests=2)) as server:
        decode, steps = server.engine.decoder.decode, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow_decode(*args: Any) -> torch.Tensor:
            loop.call_soon_threadsafe(steps.set)
            return decode(*args)

        server.engine.decoder.decode = slow_decode
        body = {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        asked = [
            asyncio.create_task(post(server, "/generate", {**body, "input_ids": [1, 2, i], "rid": f"r{i}"}))
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


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_request_continues_where_it_stopped(server: EngineServer, mode: str) -> None:
    ids, params = prompts(1, seed=4)[0], {"seed": 5, "max_new_tokens": 150, "ignore_eos": True}
    whole = await generate(server, ids, **params)
    task = asyncio.create_task(generate(server, ids, **params))
    await asyncio.sleep(0.01)
    assert (await post(server, "/pause_generation", {"mode": mode}))[0] == 200
    await asyncio.sleep(0.05)
    assert (await post(server, "/continue_generation", {}))[0] == 200
    assert (await task)["output_ids"] == whole["output_ids"]


async def test_a_paused_engine_flushes_its_cache_while_requests_wait(
    server: EngineServer,
) -> None:
    """A trainer pauses, flushes and updates while rollouts keep sending requests; SGLang holds those back too."""
    assert (await post(server, "/pause_generation", {"mode": "abort"}))[0] == 200
    await asyncio.sleep(0.2)  # what was in flight is aborted by now
    task = asyncio.create_task(generate(server, prompts(1)[0], max_new_tokens=4, ignore_eos=True))
    await asyncio.sleep(0.2)
    assert not task.done() and (await get(server, "/flush_cache"))[0] == 200
    assert (await post(server, "/continue_generation", {}))[0] == 200
    assert len((await task)["output_ids"]) == 4


async def test_new_weights_raise_the_version_and_are_served(
    policy_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    other = sharpen(build_policy(tokenizer, SIZE, seed=9))
    save_policy(other, tokenizer, tmp_path)
    ids = prompts(1)[0]
    with EngineServer(EngineOptions(model_path=str(policy_folder))) as server:
        before = await generate(server, ids, seed=1)
        assert server.update_weights(other.state_dict()) == "1"
        after = await generate(server, ids, seed=1)
        assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == ("0", "1")
        assert after["meta_info"]["cached_tokens"] == 0
        found = [entry[0] for entry in after["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(reference_log_probs(other, ids, after["output_ids"], 1.0), abs=1e-4)
        body = {"model_path": str(policy_folder), "weight_version": "step-7"}
        assert (await post(server, "/update_weights_from_disk", body))[1]["success"]
        assert (await get(server, "/get_weight_version"))[1] == {"weight_version": "step-7"}
        again = await generate(server, ids, seed=1)
        assert again["output_ids"] == before["output_ids"]
        assert again["meta_info"]["weight_version"] == "step-7"


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    server: EngineServer, tokenizer: Any, tmp_path: Path
) -> None:
    ids = prompts(1)[0]
    before = await generate(server, ids, seed=2)
    status, answer = await post(server, "/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")})
    assert status == 400 and not answer["success"] and "no config.json" in answer["message"]
    deeper = type(SIZE)(layers=3, hidden=32, heads=4, kv_heads=2, ffn=64, context=256)
    save_policy(build_policy(tokenizer, deeper), tokenizer, tmp_path)
    status, answer = await post(server, "/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert status == 400 and "another model" in answer["message"]
    after = await generate(server, ids, seed=2)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == before["meta_info"]["weight_version"]


NONSENSE = [
    ({}, "either input_ids or text"),
    ({"input_ids": [1], "text": "x"}, "either input_ids or text"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": "12"}, "list of integers"),
    ({"input_ids": [1, 2.5]}, "list of integers"),
    ({"input_ids": [1, -1]}, "input_ids has token -1"),
    ({"input_ids": [10**6]}, "input_ids has token 1000000"),
    ({"input_ids": [1] * 300}, "exceed the context of 256"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 256}}, "exceed the context of 256"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"temprature": 1.0}}, "did you mean"),
    ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
    ({"input_ids": [1], "sampling_params": {"n": 4}}, "n=4"),
    ({"input_ids": [1], "sampling_params": 3}, "mapping"),
    ({"input_ids": [1], "image_data": ["x"]}, "image_data"),
    ({"input_ids": [1], "stream": True}, "stream"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "2 prompts came with 1"),
    ([1, 2], "JSON object"),
]


@pytest.mark.parametrize(("body", "said"), NONSENSE, ids=[said for _, said in NONSENSE])
async def test_an_invalid_request_is_refused_with_a_sentence(server: EngineServer, body: Any, said: str) -> None:
    status, answer = await post(server, "/generate", body)
    assert status == 400
    assert said in answer["error"]["message"]
    assert (await get(server, "/health"))[0] == 200


async def test_a_body_that_is_not_json_is_refused(server: EngineServer) -> None:
    async with aiohttp.ClientSession() as session, session.post(server.url + "/generate", data=b"{oops") as response:
        assert response.status == 400
        assert "not JSON" in (await response.json())["error"]["message"]


async def test_a_client_that_disconnects_frees_its_place(policy_folder: Path) -> None:
    with EngineServer(EngineOptions(model_path=str(policy_folder), max_running_requests=1)) as server:
        server.engine.scheduler.pause("in_place")
        task = asyncio.create_task(generate(server, [1, 2], max_new_tokens=250, ignore_eos=True))
        while server.engine.scheduler.load()["num_waiting_reqs"] == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        while server.engine.scheduler.load()["num_waiting_reqs"]:
            await asyncio.sleep(0.01)
        server.engine.scheduler.resume()
        assert (await generate(server, [1, 2]))["output_ids"]


async def test_the_endpoints_that_a_trainer_polls_answer(server: EngineServer) -> None:
    assert (await get(server, "/health_generate"))[0] == 200
    info = (await get(server, "/get_model_info"))[1]
    assert info["model_path"] and info["is_generation"] and info["weight_version"]
    assert (await get(server, "/model_info"))[1] == info
    assert (await get(server, "/server_info"))[1]["tp_size"] == 1
    assert (await get(server, "/v1/loads?include=core"))[1]["loads"][0]["num_running_reqs"] == 0
    assert (await get(server, "/workers"))[1]["workers"][0]["url"] == server.url


def test_a_port_in_use_is_named(server: EngineServer, policy_folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"port {server.port} .* is in use"):
        EngineServer(EngineOptions(model_path=str(policy_folder), port=server.port))


def test_a_folder_without_a_model_and_a_foreign_architecture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        EngineServer(EngineOptions(model_path=str(tmp_path)))
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="holds a gpt2 model"):
        EngineServer(EngineOptions(model_path=str(tmp_path)))


async def test_a_broken_decoder_fails_the_requests_and_the_health_check(policy_folder: Path) -> None:
    with EngineServer(EngineOptions(model_path=str(policy_folder))) as server:

        def broken(*_: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

        server.engine.decoder.decode = broken
        status, answer = await post(server, "/generate", {"input_ids": [1, 2]})
        assert status == 500 and "out of memory" in answer["error"]["message"]
        assert (await get(server, "/health"))[0] == 503
        status, answer = await post(server, "/generate", {"input_ids": [1, 2]})
        assert status == 500 and "out of memory" in answer["error"]["message"]


async def test_a_closed_engine_refuses_all_requests(policy_folder: Path) -> None:
    server = EngineServer(EngineOptions(model_path=str(policy_folder)))
    server.engine.scheduler.pause("in_place")
    task = asyncio.create_task(post(server, "/generate", {"input_ids": [1, 2]}))
    while server.engine.scheduler.load()["num_waiting_reqs"] == 0:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(server.engine.scheduler.close)
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    with pytest.raises(EngineError, match="closed"):
        server.update_weights({})
    await asyncio.to_thread(server.close)
    server.close()


def test_the_command_line_ends_with_one_sentence(
    server: EngineServer, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["engine", "--model-path", str(policy_folder), "--port", str(server.port)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match=f"error: port {server.port} on 127.0.0.1 is in use"):
        main()
