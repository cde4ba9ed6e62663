"""easy-vqa end to end on a CPU: pictures, several turns, the embedded engine with a tiny VLM,
samples that train."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embedded.engine.server import EngineServer
from embedded.engine.vision import forward_inputs
from envs.loading import build_env_from
from rollout.bridge.framework import Sample
from rollout.bridge.sample import row_of
from rollout.bridge.settings import RolloutSettings
from rollout.play.runtime import close_runtimes
from rollout.samples import convert_samples_to_train_data
from rollout.tokens.encoding import DeltaEncoder
from slime_verlog import read_settings
from tests.cases import some
from tests.embedded.conftest import serve
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import Run, flat, turns_of
from tests.fixtures.vision import processor, save_tiny_vlm, tiny_vlm

pytest.importorskip(
    "easy_vqa", reason="easy-vqa is not installed; pip install easy-vqa==1.0 enables this test"
)

CONFIG = Path(__file__).parents[2] / "custom_configs" / "easy_vqa.yaml"


@pytest.fixture(scope="module", params=some(("qwen3_vl", "qwen3_5"), ["qwen3_vl"]))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    folder = save_tiny_vlm(tmp_path_factory.mktemp("vlm"), request.param)
    with serve(folder, at_once=4) as running:
        yield running


def model_of(server: EngineServer) -> Any:
    """The model that the engine serves, with gradients."""
    return tiny_vlm(server.engine.decoder.model.config.model_type)


def answer_log_probs(server: EngineServer, sample: Sample) -> torch.Tensor:
    """What a trainer computes: log-probabilities of the response from tokens and pixel tensors
    alone."""
    ids, own, model = torch.tensor(sample.tokens), server.engine.processor, model_of(server)
    inputs = forward_inputs(
        ids, dict(sample.multimodal_train_inputs or {}), model.config.image_token_id
    )
    logits = model(**inputs).logits[0, -sample.response_length - 1 : -1]
    # The rollout forbids placeholders in answers. A trained model never wants one, a random one
    # does.
    forbidden = torch.zeros(logits.shape[-1])
    forbidden[list(DeltaEncoder(own.tokenizer, own).placeholder_ids)] = -100.0
    logits = logits + forbidden
    return torch.log_softmax(logits, -1).gather(-1, ids[-sample.response_length :, None])[:, 0]


def assert_trains(server: EngineServer, samples: list[Sample]) -> None:
    """Engine and trainer agree on every trained token, and a policy gradient reaches eyes and
    words."""
    model = model_of(server)
    model.zero_grad()
    total = torch.zeros(())
    for sample in samples:
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        log_probs = answer_log_probs(server, sample)
        served = torch.tensor(sample.rollout_log_probs)
        assert torch.allclose(log_probs[mask], served[mask], atol=1e-4), (
            "engine and trainer see the same pictures"
        )
        total = total - (log_probs[mask] * (1.0 + sample.reward)).sum()
    loss = total / sum(sum(sample.loss_mask) for sample in samples)
    assert torch.isfinite(loss)
    loss.backward()
    for part in ("model.visual.", "model.language_model."):
        gradients = [
            p.grad
            for name, p in model.named_parameters()
            if name.startswith(part) and p.grad is not None
        ]
        assert all(torch.isfinite(g).all() for g in gradients), part
        assert sum(float(g.abs().sum()) for g in gradients) > 0, part
    model.zero_grad()


@asynccontextmanager
async def playing(folder: Path, server: EngineServer, **more: Any) -> AsyncIterator[Run]:
    """A run on this engine."""
    config = yaml.safe_load(CONFIG.read_text())
    read_settings(RolloutSettings, config)
    config |= {
        "hf_checkpoint": server.engine.model_path,
        "n_env": 3,
        "rollout_max_response_len": 12,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
    }
    try:
        yield Run(folder, server, **{**config, **more})
    finally:
        await close_runtimes()


async def test_whole_episodes_train_on_the_pictures_that_the_engine_saw(
    tmp_path: Path, server: EngineServer
) -> None:
    async with playing(tmp_path, server) as run:
        samples = [await run.episode() for _ in range(6)]
    assert {len(row_of(sample).turns) for sample in samples} == {3}
    for seed, sample in enumerate(samples):
        env = build_env_from("envs.easy_vqa", {"task": "train", "seed": seed})
        whole = processor().image_processor(images=list(env.question.images), return_tensors="pt")
        assert torch.equal(sample.multimodal_train_inputs["pixel_values"], whole["pixel_values"])
        assert chatml_tokenizer().decode(sample.tokens).count("<|im_start|>user") == 3
    assert_trains(server, samples)


async def test_fixed_turn_batches_train_too(tmp_path: Path, server: EngineServer) -> None:
    keys = {"history": "window", "rollout_batch_size": 16, "global_batch_size": 8}
    async with playing(tmp_path, server, **keys) as run:
        output = await run.batch()
        data = convert_samples_to_train_data(run.args, flat(output))
    turns = turns_of(output)
    assert len(turns) == 16 and all(
        len(s.multimodal_train_inputs["image_grid_thw"]) == 1 for s in turns
    )
    assert len(data["multimodal_train_inputs"]) == len(flat(output))
    assert_trains(server, turns)
