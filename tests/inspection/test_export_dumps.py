"""Exports of slime's dumps: responses without the token that ends them, and no images as text."""

from pathlib import Path

import pytest
import torch

from inspection.view.dumps import Decoder
from tests.fixtures.command import error_of
from tests.fixtures.slime_dumps import TOKENIZER, make_samples, make_turn, save_like_slime
from tests.inspection.test_export import export, rows


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    TOKENIZER.save_pretrained(str(tmp_path / "dumps" / "tokenizer"))
    return tmp_path / "dumps"


def test_a_response_has_no_end_token(dumps: Path, tmp_path: Path) -> None:
    save_like_slime(dumps, make_samples(make_turn(1, 0, last=True)), 0)
    assert export(dumps, tmp_path / "out.jsonl") == 0
    (row,) = rows(tmp_path / "out.jsonl")
    assert row["messages"][-1]["content"] == "THINK: é 0\nACTION: go"


def test_a_decoder_drops_the_end_token_and_keeps_other_control_tokens() -> None:
    ids = TOKENIZER.encode("a<|im_start|>b<|im_end|><|endoftext|>", add_special_tokens=False)
    assert Decoder(TOKENIZER).response(ids) == "a<|im_start|>b"
    assert Decoder().response(ids, "a<|im_end|>") == "a" and Decoder().response(ids).startswith(
        "An answer of 5 tokens"
    )


def test_an_episode_with_images_is_refused_and_its_placeholders_are_shown_once(
    dumps: Path, tmp_path: Path
) -> None:
    samples = make_samples(make_turn(1, 0, last=True))
    samples[0].multimodal_train_inputs = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    save_like_slime(dumps, samples, 0)
    error = export(dumps, tmp_path / "out.jsonl", of=error_of)
    assert "seed episode 1 has pictures, and rows are text" in error
    image = "<|vision_start|>{}<|vision_end|>aa"
    ids = TOKENIZER.encode(image.format("<|image_pad|>" * 256), add_special_tokens=False)
    assert Decoder(TOKENIZER).prompt(ids) == image.format("<|image_pad|>")
