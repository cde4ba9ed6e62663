"""Images that cannot be used, that come again, or that a processor cannot take."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollout.errors import EncodingError
from tests.fixtures.vision import picture
from tests.rollout.tokens.test_encoding_images import encoder_of, shown


def test_an_image_that_comes_again_with_another_reply_is_processed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, image, calls = encoder_of(), picture(0), []
    encode = encoder.images._encode
    monkeypatch.setattr(encoder.images, "_encode", lambda p: calls.append(p) or encode(p))
    again = image.copy()
    first, second = encoder.prompt([shown(image)]), encoder.prompt([shown(again)])
    assert len(calls) == 1 and first.train_inputs.parts[0] is second.train_inputs.parts[0]
    encoder.prompt([shown(image.resize((32, 128)))])
    assert len(calls) == 2


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), KeyError("size")])
def test_whatever_a_processor_raises_is_an_encoding_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    encoder = encoder_of()
    monkeypatch.setattr(encoder.images, "_processor", refuse)
    with pytest.raises(EncodingError, match="rejects a picture of 64 x 64"):
        encoder.prompt([shown(picture(0))])


def test_an_image_that_scaling_makes_too_thin_is_sent_as_it_is() -> None:
    encoder, image = encoder_of("Qwen2_5_VLProcessor"), Image.new("RGB", (112, 18724))
    prompt = encoder.prompt([shown(image)])
    sent = Image.open(io.BytesIO(base64.b64decode(prompt.image_data[0].partition(",")[2])))
    assert sent.size == image.size and int(prompt.train_inputs["image_grid_thw"].prod()) > 0


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"not a picture", "bytes cannot be read"),
        ("data:image/png;base64,@@@", "str cannot be read"),
        (12, "int cannot be read"),
        (np.zeros((4, 4, 3)), "ndarray cannot be read"),
        (Image.new("RGB", (9000, 9000)), "9000 x 9000 has more than"),
        (Image.new("RGB", (2000, 2)), "2000 x 2 is thinner than 1 : 200"),
        (Image.new("RGB", (0, 20)), "0 x 20 has no pixels"),
        (np.zeros((4, 4, 1), np.uint8), r"ndarray cannot be read: expected uint8 .* got uint8 of \(4, 4, 1\)"),
        (np.zeros((4, 4), np.uint16), "got uint16 of"),
        (Image.new("I;16", (4, 4)), "mode I;16 has more than 8 bits"),
        (Image.new("F", (4, 4)), "mode F has more than 8 bits"),
    ],
)
def test_an_unusable_picture_raises_an_encoding_error(image: Any, words: str) -> None:
    with pytest.raises(EncodingError, match=words):
        encoder_of().prompt([shown(image)])


def test_a_truncated_picture_file_raises_an_encoding_error() -> None:
    buffer = io.BytesIO()
    picture(0).save(buffer, format="PNG")
    with pytest.raises(EncodingError, match="cannot be read"):
        encoder_of().prompt([shown(buffer.getvalue()[:200])])
