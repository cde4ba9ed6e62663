"""The embedded engine with a vision-language model: log-probabilities equal those of one forward
pass."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from embedded.engine.server import EngineServer
from embedded.engine.vision import forward_inputs
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import Prompt
from tests.cases import some
from tests.embedded.conftest import serve
from tests.embedded.engine.test_engine import post
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.vision import KINDS, picture, processor, save_tiny_vlm, tiny_vlm


@pytest.fixture(scope="module", params=some(KINDS, ["qwen3_vl", "qwen3_5"]))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = save_tiny_vlm(tmp_path_factory.mktemp("vlm"), kind)
    with serve(folder, at_once=4) as running:
        yield running


def prompt_with(*seeds: int) -> Prompt:
    parts = [{"type": "image", "image": picture(seed, 64 + 32 * seed, 64)} for seed in seeds]
    return DeltaEncoder(chatml_tokenizer(), processor()).prompt(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "a red key"}]}]
    )


def body_of(prompt: Prompt, **sampling: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 12, "ignore_eos": True, **sampling}
    ids = list(prompt.engine_ids or prompt.token_ids)
    return {"input_ids": ids, "image_data": prompt.image_data, "sampling_params": sampling}


def one_forward(
    kind: str, prompt: Prompt, output: list[int], temperature: float = 1.0
) -> list[float]:
    model = tiny_vlm(kind)
    ids = torch.tensor([*prompt.token_ids, *output])
    with torch.no_grad():
        logits = model(
            **forward_inputs(ids, dict(prompt.train_inputs or {}), model.config.image_token_id)
        ).logits[0]
    log_probs = torch.log_softmax(logits[len(prompt.token_ids) - 1 : -1] / temperature, -1)
    return log_probs.gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()


def log_probs_of(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def test_concurrent_requests_see_their_own_pictures(kind: str, server: EngineServer) -> None:
    prompts = [prompt_with(0), prompt_with(1), prompt_with(), prompt_with(2, 0)]
    bodies = [body_of(prompt, temperature=0.9, sampling_seed=k) for k, prompt in enumerate(prompts)]
    together = await asyncio.gather(*(post(server, "/generate", body) for body in bodies * 2))
    alone = [await post(server, "/generate", body) for body in bodies]
    assert [a["output_ids"] for _, a in together] == [a["output_ids"] for _, a in alone] * 2
    for prompt, (_, answer) in zip(prompts, alone, strict=True):
        assert answer["meta_info"]["prompt_tokens"] == len(prompt.token_ids)
        assert log_probs_of(answer) == pytest.approx(
            one_forward(kind, prompt, answer["output_ids"], 0.9), abs=1e-4
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_data": []}, "image_data is empty"),
        ({"image_data": ["data:image/png;base64,AAAA"]}, "cannot be read"),
        ({"image_data": "DOUBLE"}, "1 placeholders for 2 images"),
    ],
)
async def test_an_unsupported_request_is_refused_with_a_sentence(
    server: EngineServer, change: dict[str, Any], words: str
) -> None:
    prompt = prompt_with(0)
    if change.get("image_data") == "DOUBLE":
        change = {"image_data": prompt.image_data * 2}
    status, answer = await post(server, "/generate", {**body_of(prompt), **change})
    assert status == 400 and words in answer["error"]["message"]
