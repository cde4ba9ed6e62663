"""Geometry problems from slime's own data set through `generate`: two tries, the picture in both, a
graded sample."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout.bridge.framework import Sample
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import playing
from tests.fixtures.vision import processor, vlm_folder

pytest.importorskip(
    "math_verify", reason="math-verify is not installed; pip install 'math-verify[antlr4_13_2]'"
)

ANSWERS = [r"Half of it: \boxed{3}", r"With the root: \boxed{\sqrt{18}}"]


def problem() -> Sample:
    """A sample as slime makes it with --multimodal-keys and without --apply-chat-template."""
    sample = Sample()
    sample.index, sample.group_index = 5, 1
    picture = Image.new("RGB", (96, 64), "white")
    parts = [{"type": "image", "image": "data:..."}, {"type": "text", "text": "Find $x$."}]
    sample.prompt = [{"role": "user", "content": parts}]
    sample.label = r"3 \sqrt { 2 }"
    sample.multimodal_inputs = {"images": [picture], "videos": None}
    return sample


async def play(folder: Path, sample: Sample, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    settings = {
        "rollout_interaction_env_path": "envs.geo3k",
        "tasks": [],
        "history": "full",
        **more,
    }
    checkpoint = {"hf_checkpoint": str(vlm_folder()), "rollout_max_response_len": 64}
    async with playing(
        folder, lambda body, number: ANSWERS[number % 2], **settings, **checkpoint
    ) as run:
        return await run.episode(sample), run.engine.requests


@pytest.mark.parametrize("backend", some(["inline", "process"], ["process"]))
async def test_a_wrong_answer_is_corrected_with_the_picture_still_in_sight(
    tmp_path: Path, backend: str
) -> None:
    sample = problem()
    expected = processor().image_processor(
        images=sample.multimodal_inputs["images"], return_tensors="pt"
    )
    result, requests = await play(tmp_path, sample, env_backend=backend, env_workers=1)
    assert (
        result.prompt == sample.prompt
        and result.status == Sample.Status.COMPLETED
        and result.reward == 1.0
    )
    assert [len(request["image_data"]) for request in requests] == [1, 1]
    assert requests[0]["image_data"] == requests[1]["image_data"]
    assert result.multimodal_train_inputs["pixel_values"].equal(expected["pixel_values"])
    text = chatml_tokenizer().decode(result.tokens)
    assert "Your answer is wrong" in text and text.count("Find $x$.") == 1
    assert result.label == r"3 \sqrt { 2 }" and result.metadata["episode_turns"] == 2


async def test_a_problem_whose_picture_is_broken_fails_alone(tmp_path: Path) -> None:
    sample = problem()
    sample.multimodal_inputs = {"images": [b"no picture"]}
    result, requests = await play(tmp_path, sample)
    assert result.status == Sample.Status.FAILED and "cannot be read" in result.metadata["fault"]
    assert not requests and result.loss_mask == [0]
