"""Pictures in training data: some kB of PNG, and on the training rank the processor's own tensors,
bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage.training.images import CODE, expand
from rollout.tokens.images import make_small
from tests.fixtures.vision import every_processor, picture, processor


def processed(name: str, *pictures: Any) -> dict[str, torch.Tensor]:
    return dict(processor(name).image_processor(images=list(pictures), return_tensors="pt"))


SIZES = st.lists(st.tuples(st.integers(28, 200), st.integers(28, 200)), min_size=1, max_size=4)


@every_processor
@settings(max_examples=15, deadline=None)
@given(sizes=SIZES)
def test_expanding_gives_back_the_processors_tensors_bit_for_bit(
    name: str, sizes: list[tuple[int, int]]
) -> None:
    """slime concatenates every key of a micro-batch's samples along dim 0."""
    pictures = [picture(seed, *size) for seed, size in enumerate(sizes)]
    smalls = [make_small(processed(name, one), processor(name).image_processor) for one in pictures]
    together = {key: torch.cat([small[key] for small in smalls]) for key in smalls[0]}
    whole, expanded = processed(name, *pictures), expand(together)
    assert CODE in together and expanded.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(expanded[key], value) and expanded[key].dtype == value.dtype


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: {
            **inputs,
            "pixel_values": inputs["pixel_values"] * torch.linspace(1, 2, 1176),
        },
        lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"].bfloat16()},
        lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"][:, :-1]},
        lambda inputs: {"pixel_values": inputs["pixel_values"]},
        lambda inputs: {**inputs, "image_grid_thw": inputs["image_grid_thw"] * 2},
    ],
)
def test_what_would_not_come_back_exactly_stays_as_it_is(change: Any) -> None:
    name = "Qwen2_5_VLProcessor"
    inputs = change(processed(name, picture(0)))
    assert make_small(inputs, processor(name).image_processor) is inputs
    assert expand(inputs).keys() == inputs.keys()
