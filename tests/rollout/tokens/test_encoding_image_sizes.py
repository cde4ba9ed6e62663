"""Large pictures are scaled down, and the engine gets the scaled picture where that is the same to it."""

import base64
import io
from typing import Any

import pytest
import torch
from PIL import Image

from advantage.training.images import expand
from rollout.tokens.encoding import DeltaEncoder
from rollout.tokens.images import build_qwen_processor
from rollout.turn import Prompt
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.vision import SETTINGS, picture, processor
from tests.rollout.tokens.test_encoding_images import PROCESSORS, shown


@pytest.mark.parametrize("name", ["Qwen2_5_VLProcessor", "Qwen3VLProcessor"])
@pytest.mark.parametrize("size", [(4321, 7679), (8000, 300)])
def test_a_picture_beyond_max_image_pixels_is_scaled_down_to_that_many_tokens(name: str, size: tuple[int, int]) -> None:
    limit = 1 << 18
    encoder = DeltaEncoder(chatml_tokenizer(), processor(name), max_image_pixels=limit)
    settings = processor(name).image_processor
    prompt = encoder.prompt([shown(Image.new("RGB", size, "red"))])
    tokens = prompt.token_ids.count(encoder.images.token_id)
    most = limit // (settings.patch_size * settings.merge_size) ** 2
    assert most * 0.8 < tokens <= most
    sent = Image.open(io.BytesIO(base64.b64decode(prompt.image_data[0].partition(",")[2])))
    assert sent.width / sent.height == pytest.approx(size[0] / size[1], rel=0.25)


class Halving:
    """An image processor that scales every picture to half its sides before the real one sees it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, images: list[Image.Image], **options: Any) -> Any:
        return self._inner(images=[image.resize((image.width // 2, image.height // 2)) for image in images], **options)


def sent(prompt: Prompt) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(prompt.image_data[0].partition(",")[2])))


def limited(name: str) -> Any:
    """A processor that scales pictures down to 128 x 128 pixels."""
    sizes = {"size": {"shortest_edge": 4096, "longest_edge": 128**2}}
    return build_qwen_processor(name, chatml_tokenizer(), {**SETTINGS[name], **sizes}, None)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("size", [(512, 512), (300, 701)])
def test_the_engine_gets_the_processors_scaled_picture_of_which_it_makes_the_same_inputs(
    name: str, small: bool, size: tuple[int, int]
) -> None:
    own, shot = limited(name), picture(0, *size)
    prompt = DeltaEncoder(chatml_tokenizer(), own, small_images=small).prompt([shown(shot)])
    assert sent(prompt).width * sent(prompt).height <= 128**2 < size[0] * size[1] / 10
    whole, again = (own.image_processor(images=[each], return_tensors="pt") for each in (shot, sent(prompt)))
    assert all(torch.equal(again[key], value) for key, value in whole.items())
    assert all(torch.equal(expand(dict(prompt.train_inputs))[key], value) for key, value in whole.items())


def test_the_engine_gets_the_picture_itself_if_the_processor_would_change_a_scaled_one_again() -> None:
    own = limited("Qwen3VLProcessor")
    own.image_processor = Halving(own.image_processor)
    prompt = DeltaEncoder(chatml_tokenizer(), own).prompt([shown(picture(0, 512, 512))])
    assert sent(prompt).size == (512, 512)
