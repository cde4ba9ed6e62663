"""Pictures in training data: some kB of PNG, and on the training rank the processor's own tensors, bit for bit."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage import patch
from advantage.training.images import CODE, expand
from rollout.tokens.images import make_small
from tests.fixtures.vision import picture, processor

PROCESSORS = ("Qwen2_5_VLProcessor", "Qwen3VLProcessor")


def processed(name: str, *pictures: Any) -> dict[str, torch.Tensor]:
    return dict(processor(name).image_processor(images=list(pictures), return_tensors="pt"))


@pytest.mark.parametrize("name", PROCESSORS)
@settings(max_examples=15, deadline=None)
@given(width=st.integers(28, 200), height=st.integers(28, 200), seed=st.integers(0, 99))
def test_expanding_gives_back_the_processors_tensor_bit_for_bit(name: str, width: int, height: int, seed: int) -> None:
    whole = processed(name, picture(seed, width, height))
    small = make_small(whole, processor(name).image_processor)
    assert CODE in small
    expanded = expand(small)
    assert expanded.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(expanded[key], value) and expanded[key].dtype == value.dtype


@pytest.mark.parametrize("name", PROCESSORS)
def test_pictures_of_several_samples_are_concatenated_as_slime_does_and_expanded_in_order(name: str) -> None:
    """slime concatenates every key of a micro-batch's samples along dim 0."""
    pictures = [picture(seed, 56 + 28 * seed, 84) for seed in range(4)]
    smalls = [make_small(processed(name, one), processor(name).image_processor) for one in pictures]
    together = {key: torch.cat([small[key] for small in smalls]) for key in smalls[0]}
    wanted = processed(name, *pictures)
    assert all(torch.equal(value, wanted[key]) for key, value in expand(together).items())


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"] * torch.linspace(1, 2, 1176)},
        lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"].bfloat16()},
        lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"][:, :-1]},
        lambda inputs: {"pixel_values": inputs["pixel_values"]},
        lambda inputs: {**inputs, "image_grid_thw": inputs["image_grid_thw"] * 2},
    ],
)
def test_what_would_not_come_back_exactly_stays_as_it_is(change: Any) -> None:
    inputs = change(processed(PROCESSORS[0], picture(0)))
    assert make_small(inputs, processor(PROCESSORS[0]).image_processor) is inputs
    assert expand(inputs).keys() == inputs.keys()


def test_a_processor_of_another_kind_or_a_video_keeps_its_tensors() -> None:
    inputs = processed(PROCESSORS[0], picture(0))
    assert make_small(inputs, SimpleNamespace(size=224)) is inputs
    values = inputs["pixel_values"].clone()
    values[:, -1] = 0.25  # the two frames of a patch differ
    inputs["pixel_values"] = values
    assert make_small(inputs, processor(PROCESSORS[0]).image_processor) is inputs


def test_the_patch_expands_every_micro_batch_of_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.advantage.test_patch import fake_slime, flags

    model = ModuleType("slime.backends.megatron_utils.model")
    whole = processed(PROCESSORS[0], picture(1))
    small = make_small(whole, processor(PROCESSORS[0]).image_processor)
    batches = iter([{"multimodal_train_inputs": small}, {"multimodal_train_inputs": None}, {}])
    model.get_batch = lambda iterator, keys: next(batches)  # type: ignore[attr-defined]
    model.train_one_step = lambda *_, **__: ({}, 0.0)  # type: ignore[attr-defined]
    model.loss_function = lambda *_, **__: (0.0, 1, {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.loss", fake_slime())
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.model", model)
    patch.install(flags())
    found = [model.get_batch(None, []) for _ in range(3)]
    assert torch.equal(found[0]["multimodal_train_inputs"]["pixel_values"], whole["pixel_values"])
    assert found[1:] == [{"multimodal_train_inputs": None}, {}]
