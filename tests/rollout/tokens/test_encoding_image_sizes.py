"""Large pictures are scaled down, and the engine gets the scaled picture where that is the same to
it."""

import base64
import io

import pytest
from PIL import Image

from rollout.tokens.encoding import DeltaEncoder
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.vision import every_processor, processor
from tests.rollout.tokens.test_encoding_images import shown


@every_processor
@pytest.mark.parametrize("size", [(4321, 7679), (8000, 300)])
def test_a_picture_beyond_max_image_pixels_is_scaled_down_to_that_many_tokens(
    name: str, size: tuple[int, int]
) -> None:
    limit = 1 << 18
    encoder = DeltaEncoder(chatml_tokenizer(), processor(name), max_image_pixels=limit)
    settings = processor(name).image_processor
    prompt = encoder.prompt([shown(Image.new("RGB", size, "red"))])
    tokens = prompt.token_ids.count(encoder.images.token_id)
    most = limit // (settings.patch_size * settings.merge_size) ** 2
    assert most * 0.8 < tokens <= most
    sent = Image.open(io.BytesIO(base64.b64decode(prompt.image_data[0].partition(",")[2])))
    assert sent.width / sent.height == pytest.approx(size[0] / size[1], rel=0.25)
