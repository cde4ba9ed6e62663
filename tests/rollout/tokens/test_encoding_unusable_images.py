"""Images that cannot be used, that come again, or that a processor cannot take."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollout.errors import EncodingError
from tests.fixtures.vision import picture
from tests.rollout.tokens.test_encoding_images import encoder_of, shown


def test_whatever_a_processor_raises_is_an_encoding_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("division by zero")

    encoder = encoder_of()
    monkeypatch.setattr(encoder.images, "_processor", refuse)
    with pytest.raises(EncodingError, match="rejects a picture of 64 x 64"):
        encoder.prompt([shown(picture(0))])


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "bytes cannot be read"),
        (Image.new("RGB", (9000, 9000)), "9000 x 9000 has more than"),
        (Image.new("RGB", (2000, 2)), "2000 x 2 is thinner than 1 : 200"),
        (
            np.zeros((4, 4, 2), np.uint8),
            r"ndarray cannot be read: expected uint8 .* got uint8 of \(4, 4, 2\)",
        ),
        (Image.new("I;16", (4, 4)), "mode I;16 has more than 8 bits"),
    ],
)
def test_an_unusable_picture_raises_an_encoding_error(image: Any, words: str) -> None:
    with pytest.raises(EncodingError, match=words):
        encoder_of().prompt([shown(image)])
