"""Games as pictures, with or without text, through the rollout in both histories: no turn is
blind."""

import base64
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from envs.loading import build_env_from
from rollout.bridge.framework import Sample
from rollout.bridge.sample import row_of
from tests.cases import pairs, some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import both_histories, flat, one_slot, playing, turns_of
from tests.fixtures.vision import processor, vlm_folder

GAMES = {
    "envs.babyai": ("goto", "turn left", "minigrid"),
    "envs.babaisai": ("two_room-goto_win", "right", ""),
    "envs.crafter": ("default", "Move West", ""),
}
TURNS = 4


def needs(game: str) -> None:
    package = GAMES[game][2]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{game} needs {package}; pip install 'slime-verlog[envs]' enables this test")


def settings(game: str, vlm: Any, **more: Any) -> dict[str, Any]:
    task = GAMES[game][0]
    options = {"vlm": vlm, "max_steps": TURNS} if game != "envs.babaisai" else {"vlm": vlm}
    return {
        "hf_checkpoint": str(vlm_folder()),
        "rollout_interaction_env_path": game,
        "tasks": [task],
        "env": options,
        "max_turns": TURNS,
        "rollout_max_response_len": 32,
        "rollout_max_context_len": 60_000,
        **more,
    }


def pictures_of(game: str, vlm: Any) -> list[np.ndarray]:
    """What the environment itself shows on the first turns of the episode, as pixels."""
    task, action, _ = GAMES[game]
    env = build_env_from(game, {"task": task, "seed": 0}, {"vlm": vlm})
    shown = [env.reset(), *(env.step(action)[0] for _ in range(TURNS - 1))]
    return [np.asarray(o["multi_modal_data"]["image"][0]) for o in shown]


def sent(request: dict[str, Any]) -> list[np.ndarray]:
    """The pictures of a request, decoded as the engine would."""
    raw = (base64.b64decode(data.partition(",")[2]) for data in request.get("image_data", []))
    return [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in raw]


async def play(
    folder: Path, game: str, vlm: Any, script: Any = None, **more: Any
) -> tuple[Any, list[dict[str, Any]], dict[str, int]]:
    """A whole episode, its requests, and what was counted."""
    needs(game)
    script = script or (lambda body, number: GAMES[game][1])
    async with playing(folder, script, **settings(game, vlm, **more)) as run:
        return await run.episode(), run.engine.requests, (await run.runtime()).counters


def assert_pictures(request: dict[str, Any], expected: list[np.ndarray]) -> None:
    got = sent(request)
    assert len(got) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    placeholder = chatml_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert request["input_ids"].count(placeholder) == len(expected)


@pytest.mark.parametrize(("game", "vlm"), pairs(GAMES, [True, "only"]))
async def test_in_full_history_the_engine_sees_every_picture_on_every_later_turn(
    tmp_path: Path, game: str, vlm: Any
) -> None:
    sample, requests, _ = await play(tmp_path, game, vlm, history="full")
    expected = pictures_of(game, vlm)
    assert len(requests) == TURNS and sample.status == Sample.Status.TRUNCATED
    for turn, request in enumerate(requests):
        assert_pictures(request, expected[: turn + 1])
    whole = processor().image_processor(
        images=[Image.fromarray(p) for p in expected], return_tensors="pt"
    )
    for key in ("pixel_values", "image_grid_thw"):
        assert torch.equal(sample.multimodal_train_inputs[key], whole[key])
    placeholder = chatml_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert sample.tokens.count(placeholder) == int(whole["image_grid_thw"].prod(-1).sum()) // 4
    text = chatml_tokenizer().decode(requests[-1]["input_ids"])
    assert ("The picture shows what you see." in text) == (vlm == "only")


@pytest.mark.parametrize("game", some(GAMES, ["envs.babyai", "envs.babaisai"]))
async def test_in_a_window_pictures_come_and_go_with_their_turns(tmp_path: Path, game: str) -> None:
    samples, requests, _ = await play(
        tmp_path, game, True, history="window", memory={"kind": "window", "n": 1}
    )
    expected = pictures_of(game, True)
    assert len(samples) == len(requests) == TURNS
    for turn, (sample, request) in enumerate(zip(samples, requests, strict=True)):
        shown = expected[max(0, turn - 1) : turn + 1]
        assert_pictures(request, shown)
        whole = processor().image_processor(
            images=[Image.fromarray(p) for p in shown], return_tensors="pt"
        )
        assert torch.equal(sample.multimodal_train_inputs["pixel_values"], whole["pixel_values"])


async def test_a_context_that_is_full_ends_the_episode_and_splits_no_picture(
    tmp_path: Path,
) -> None:
    whole, all_requests, _ = await play(tmp_path, "envs.babyai", True, history="full")
    limit = len(whole.tokens) - 20
    sample, requests, _ = await play(
        tmp_path, "envs.babyai", True, history="full", rollout_max_context_len=limit
    )
    assert len(requests) < len(all_requests) and sample.status == Sample.Status.TRUNCATED
    assert sample.metadata["stop"] == "context" and len(sample.tokens) <= limit
    assert_no_stray_placeholder(sample)
    assert len(sample.multimodal_train_inputs["image_grid_thw"]) == len(requests)


def writes_a_placeholder(body: dict[str, Any], number: int) -> str:
    return "turn <|image_pad|> left<|image_pad|>" if number == 1 else "turn left"


def assert_no_stray_placeholder(sample: Sample) -> None:
    placeholder = chatml_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    grids = sample.multimodal_train_inputs["image_grid_thw"]
    assert sample.tokens.count(placeholder) == int(grids.prod(-1).sum()) // 4


@both_histories
async def test_an_answer_with_a_placeholder_is_masked_and_the_episode_goes_on(
    tmp_path: Path, history: str
) -> None:
    result, requests, counters = await play(
        tmp_path, "envs.babyai", True, writes_a_placeholder, history=history
    )
    assert len(requests) == TURNS and counters["answers_with_placeholder"] == 1
    samples = result if history == "window" else [result]
    for part in samples:
        assert_no_stray_placeholder(part)
    spans = [(part, turn) for part in samples for turn in row_of(part).turns]
    assert [set(part.loss_mask[turn.start : turn.end]) for part, turn in spans] == [
        {1},
        {0},
        {1},
        {1},
    ]


async def test_a_fixed_turn_batch_counts_answers_with_a_placeholder(tmp_path: Path) -> None:
    needs("envs.babyai")
    given = settings("envs.babyai", True, **one_slot(3))
    async with playing(tmp_path, writes_a_placeholder, **given) as run:
        output = await run.batch()
    assert output.metrics["rollout/faults/answers_with_placeholder"] == 1.0
    for sample in flat(output):
        assert_no_stray_placeholder(sample)
    assert [set(sample.loss_mask) for sample in turns_of(output)] == [{1}, {0}, {1}]
