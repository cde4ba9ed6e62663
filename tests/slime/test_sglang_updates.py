"""A real SGLang gets new weights while responses are in flight, with `on_update: continue`."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from embedded.engine.decoder import load_hf_model
from embedded.warmstart.policy import save_policy
from rollout.bridge.settings import EngineSettings
from rollout.play.engine import EngineClient
from rollout.turn import Prompt
from tests.slime.test_sglang import sglang  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow
TOKENS = 200


async def test_a_response_goes_on_with_the_new_weights_and_has_the_log_probs_of_both(
    sglang: int,  # noqa: F811
    model: Path,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    old, new = load_hf_model(model), load_hf_model(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    save_policy(new, tokenizer, tmp_path)
    prompts = [torch.randint(0, 250, (40 + k,), generator=generator).tolist() for k in range(4)]
    params = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    client = EngineClient(f"http://127.0.0.1:{sglang}", EngineSettings(timeout_s=300.0))
    async with aiohttp.ClientSession(client.url) as session:

        async def post(path: str, **body: Any) -> int:
            async with session.post(path, json=body) as answer:
                return answer.status

        asked = [asyncio.create_task(client.generate(Prompt(ids), params)) for ids in prompts]
        # This one ends while the others are written.
        await client.generate(Prompt(prompts[0]), {**params, "max_new_tokens": 5})
        assert await post("/pause_generation", mode="retract") == 200
        while await post("/flush_cache") != 200:
            await asyncio.sleep(0.1)
        assert (
            await post("/update_weights_from_disk", model_path=str(tmp_path), weight_version="7")
            == 200
        )
        assert await post("/continue_generation") == 200
        answers = await asyncio.gather(*asked)
        assert (
            await post("/update_weights_from_disk", model_path=str(model), weight_version="8")
            == 200
        )
    await client.close()
    mixed = 0
    for ids, answer in zip(prompts, answers, strict=True):
        output = list(answer.token_ids)
        assert (
            len(output) == TOKENS == answer.version_ends[-1] and answer.weight_versions[-1] == "7"
        )
        mixed += len(answer.weight_versions) == 2
        start = 0
        for weights, end in zip(
            (old, new)[-len(answer.weight_versions) :], answer.version_ends, strict=True
        ):
            expected = log_probs(weights, ids, output)[start:end]
            difference = (torch.tensor(list(answer.log_probs))[start:end] - expected).abs().max()
            assert difference < 2e-3, (start, end, difference)
            start = end
    assert mixed, "some responses were in flight when the weights came"


def log_probs(weights: Any, ids: list[int], output: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = weights(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1].float()
    return torch.log_softmax(logits, -1)[torch.arange(len(output)), output]
