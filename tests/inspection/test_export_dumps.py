"""Exports of slime's dumps: responses without the token that ends them, and no images as text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inspection.command import main
from inspection.view.dumps import Decoder
from tests.fixtures.slime_dumps import TOKENIZER, make_samples, make_turn, save_like_slime


def export(*words: Any) -> str | None:
    with pytest.raises(SystemExit) as end:
        main(["export", *map(str, words)])
    return None if end.value.code == 0 else str(end.value.code)


def test_a_response_has_no_end_token(tmp_path: Path) -> None:
    save_like_slime(tmp_path / "dumps", make_samples(make_turn(1, 0, last=True)), 0)
    TOKENIZER.save_pretrained(str(tmp_path / "dumps" / "tokenizer"))
    out = tmp_path / "out.jsonl"
    assert export(tmp_path / "dumps", "--format", "jsonl", "--out", out) is None
    assert json.loads(out.read_text())["messages"][-1]["content"] == "THINK: é 0\nACTION: go"


def test_a_decoder_drops_the_end_token_and_keeps_other_control_tokens() -> None:
    ids = TOKENIZER.encode("a<|im_start|>b<|im_end|><|endoftext|>", add_special_tokens=False)
    assert Decoder(TOKENIZER).response(ids) == "a<|im_start|>b"
    assert Decoder().response(ids, "a<|im_end|>") == "a" and Decoder().response(ids).startswith("An answer of 5 tokens")


def test_an_episode_with_images_is_refused_and_its_placeholders_are_shown_once(tmp_path: Path) -> None:
    samples = make_samples(make_turn(1, 0, last=True))
    samples[0].multimodal_train_inputs = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    save_like_slime(tmp_path / "dumps", samples, 0)
    TOKENIZER.save_pretrained(str(tmp_path / "dumps" / "tokenizer"))
    error = export(tmp_path / "dumps", "--format", "jsonl", "--out", tmp_path / "out.jsonl")
    assert error is not None and "seed episode 1 has pictures, and jsonl is for text" in error
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    ids = TOKENIZER.encode(image.replace("<|image_pad|>", "<|image_pad|>" * 256) + "aa", add_special_tokens=False)
    assert Decoder(TOKENIZER).prompt(ids) == image + "aa"
