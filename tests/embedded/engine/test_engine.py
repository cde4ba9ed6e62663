"""The embedded engine answers like SGLang, with the log-probabilities of transformers."""

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from embedded.engine.decoder import load_hf_model
from embedded.engine.server import EngineServer, main
from embedded.warmstart.policy import save_policy
from rollout.errors import ConfigError, EngineError
from tests.embedded.conftest import SHAPE, SHAPES, model_of_shape, serve


async def post(server: EngineServer, path: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json=body) as response,
    ):
        text = await response.text()
        return response.status, await response.json() if text.startswith(("{", "[")) else text


async def get(server: EngineServer, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(server.url + path) as response:
        return (
            response.status,
            await response.json() if response.content_type == "application/json" else None,
        )


async def generate(server: EngineServer, ids: list[int], **params: Any) -> dict[str, Any]:
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 12, **params},
        "return_logprob": True,
    }
    status, answer = await post(server, "/generate", body)
    assert status == 200, answer
    return answer


async def until_waiting(server: EngineServer, requests: int) -> None:
    """Returns once so many requests wait for their turn."""
    while server.engine.scheduler.load()["num_waiting_reqs"] != requests:
        await asyncio.sleep(0.01)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(250) for _ in range(20)]
    return [head + [rng.randrange(250) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def reference_log_probs(
    model: Any, ids: list[int], output: list[int], temperature: float
) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[torch.arange(len(output)), output].tolist()


@pytest.mark.parametrize("shape", [*SHAPES, "llama3 rope"])
async def test_log_probs_of_concurrent_requests_are_those_of_transformers(
    shape: str, tokenizer: Any, tmp_path: Path
) -> None:
    save_policy(model_of_shape(shape, tokenizer), tokenizer, tmp_path)
    asked = prompts(24)
    with serve(tmp_path) as server:
        answers = await asyncio.gather(
            *(generate(server, ids, temperature=0.7, ignore_eos=True) for ids in asked)
        )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for ids, answer in zip(asked, answers, strict=True):
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert answer["meta_info"]["completion_tokens"] == 12
        assert found == pytest.approx(
            reference_log_probs(model, ids, answer["output_ids"], 0.7), abs=1e-4
        )
    assert any(answer["meta_info"]["cached_tokens"] >= 20 for answer in answers)


async def test_an_answer_does_not_depend_on_concurrent_requests(server: EngineServer) -> None:
    asked = prompts(20, seed=3)
    together = await asyncio.gather(
        *(generate(server, ids, sampling_seed=i) for i, ids in enumerate(asked))
    )
    for i in reversed(range(20)):
        alone = await generate(server, asked[i], sampling_seed=i)
        assert alone["output_ids"] == together[i]["output_ids"]


async def test_greedy_answers_take_the_likeliest_token(
    server: EngineServer, policy_folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    ids = prompts(1)[0]
    output = (await generate(server, ids, temperature=0.0, ignore_eos=True))["output_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
    assert output == logits.argmax(-1).tolist()


async def test_cached_tokens_count_what_was_not_computed_again(policy_folder: Path) -> None:
    with serve(policy_folder) as server:
        ids = prompts(1)[0]
        first = await generate(server, ids, sampling_seed=1)
        again = await generate(server, ids, sampling_seed=1)
        longer = await generate(server, ids + first["output_ids"] + [5, 6])
        assert first["meta_info"]["cached_tokens"] == 0
        assert again["meta_info"]["cached_tokens"] == len(ids) - 1
        assert again["output_ids"] == first["output_ids"]
        # The last drawn token was never fed back, so its keys are not in the cache.
        assert longer["meta_info"]["cached_tokens"] == len(ids) + len(first["output_ids"]) - 1
        assert (await get(server, "/flush_cache"))[0] == 200
        assert (await generate(server, ids))["meta_info"]["cached_tokens"] == 0


async def test_a_stop_id_ends_an_answer_and_is_trimmed_unless_asked_for(
    server: EngineServer,
) -> None:
    ids, greedy = (
        prompts(1, seed=8)[0],
        {"temperature": 0, "ignore_eos": True, "max_new_tokens": 30},
    )
    free = await generate(server, ids, **greedy)
    stop_id = free["output_ids"][6]
    cut = free["output_ids"][: free["output_ids"].index(stop_id) + 1]
    trimmed = await generate(server, ids, **greedy, stop_token_ids=[stop_id])
    kept = await generate(server, ids, **greedy, stop_token_ids=[stop_id], no_stop_trim=True)
    assert trimmed["output_ids"] == kept["output_ids"] == cut
    assert kept["text"].startswith(trimmed["text"]) and kept["text"] != trimmed["text"]
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    assert free["meta_info"]["finish_reason"] == {"type": "length", "length": 30}


def test_a_port_in_use_is_named(
    server: EngineServer, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["engine", "--model-path", str(policy_folder), "--port", str(server.port)]
    )
    with pytest.raises(SystemExit, match=f"error: port {server.port} .* is in use"):
        main()


async def test_a_broken_decoder_fails_the_requests_and_the_health_check(
    policy_folder: Path,
) -> None:
    with serve(policy_folder) as server:

        def broken(*_: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

        server.engine.decoder.decode = broken
        for _ in range(2):
            status, answer = await post(server, "/generate", {"input_ids": [1, 2]})
            assert status == 500 and "out of memory" in answer["error"]["message"]
            assert (await get(server, "/health"))[0] == 503


async def test_a_closed_engine_refuses_all_requests(policy_folder: Path) -> None:
    server = serve(policy_folder)
    server.engine.scheduler.pause("retract")
    task = asyncio.create_task(post(server, "/generate", {"input_ids": [1, 2]}))
    await until_waiting(server, 1)
    await asyncio.to_thread(server.engine.scheduler.close)
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    with pytest.raises(EngineError, match="closed"):
        server.engine.scheduler.update_weights({}).result(600)
    await asyncio.to_thread(server.close)
    server.close()


@pytest.mark.parametrize(
    ("kind", "entries", "said"),
    [
        (LlamaConfig, {"attention_bias": True}, "has attention_bias: True"),
        (LlamaConfig, {"mlp_bias": True}, "has mlp_bias: True"),
        (LlamaConfig, {"hidden_act": "gelu"}, "has hidden_act: gelu"),
        (MistralConfig, {"sliding_window": 64}, "has sliding_window: 64"),
        (
            Qwen3Config,
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            "sliding_attention",
        ),
        (GPT2Config, {}, "holds a gpt2 model"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_by_its_entry(
    kind: Any, entries: dict[str, Any], said: str, tmp_path: Path
) -> None:
    kind(**({} if kind is GPT2Config else SHAPE), **entries).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{said}.* Serve it with SGLang instead"):
        load_hf_model(tmp_path)
