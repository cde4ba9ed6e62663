"""Pictures: ids, grids, pixels and logits equal one-shot processing, for engine and training."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from rollout.errors import EncodingError
from rollout.tokens.encoding import DeltaEncoder
from rollout.tokens.images import load_processor
from rollout.turn import FinishReason, Generation, Prompt
from tests.fixtures.chatml import CHAT_TEMPLATE, chatml_tokenizer
from tests.fixtures.messages import answer, response, system, user
from tests.fixtures.tokenizers import real_tokenizer
from tests.fixtures.vision import every_processor, picture, processor


def encoder_of(name: str = "Qwen3VLProcessor", **options: Any) -> DeltaEncoder:
    return DeltaEncoder(chatml_tokenizer(), processor(name), **options)


def shown(*images: Any, text: str = "a red key") -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def one_shot(messages: list[dict[str, Any]], name: str = "Qwen3VLProcessor") -> dict[str, Any]:
    """The whole conversation through the processor at once."""
    images = [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    text = chatml_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return processor(name)(text=[text], images=images or None, return_tensors="pt")


def assert_same(prompt: Prompt, expected: dict[str, Any]) -> None:
    assert prompt.token_ids == expected["input_ids"][0].tolist()
    assert set(prompt.train_inputs) == {"pixel_values", "image_grid_thw"}
    for key, value in prompt.train_inputs.items():
        assert torch.equal(value, expected[key]), key
    assert len(prompt.image_data) == len(expected["image_grid_thw"])


SIZES = st.tuples(st.integers(28, 160), st.integers(28, 160))


@every_processor
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_conversation_with_pictures_equals_its_one_shot_processing(
    name: str, data: Any
) -> None:
    messages = [system()] if data.draw(st.booleans()) else []
    for turn in range(data.draw(st.integers(1, 3))):
        sizes = data.draw(st.lists(SIZES, max_size=2 if turn else 1, min_size=0 if turn else 1))
        parts: list[Any] = [{"type": "image", "image": picture(turn, *size)} for size in sizes]
        parts.insert(
            data.draw(st.integers(0, len(parts))),
            {"type": "text", "text": data.draw(st.text(max_size=9))},
        )
        role = data.draw(st.sampled_from(["user", "tool"])) if turn else "user"
        messages += [{"role": role, "content": parts}, answer()]
    messages[-1] = user("next")
    assert_same(encoder_of(name).prompt(messages), one_shot(messages, name))


@every_processor
def test_an_appended_conversation_with_pictures_equals_its_one_shot_processing(name: str) -> None:
    encoder = encoder_of(name)
    messages = [
        shown(picture(0)),
        answer(),
        shown(picture(1, 90, 60), picture(2)),
        answer(),
        shown(text="no picture"),
    ]
    prompt = encoder.prompt(messages[:1])
    for message in messages[2::2]:
        prompt = encoder.append(prompt, response(encoder), [message])
    assert_same(prompt, one_shot(messages, name))
    encoder.check(messages, prompt.token_ids)


def test_the_engine_gets_one_placeholder_a_picture_and_every_picture_again_each_turn() -> None:
    encoder = encoder_of()
    token = encoder.images.token_id
    prompt, prompts = encoder.prompt([shown(picture(0))]), []
    for turn in range(1, 4):
        prompts.append(prompt)
        assert prompt.engine_ids.count(token) == len(prompt.image_data) == turn
        assert (
            prompt.token_ids.count(token)
            == int(prompt.train_inputs["image_grid_thw"].prod(-1).sum()) // 4
        )
        prompt = encoder.append(prompt, [5, encoder.end_of_turn_ids[0]], [shown(picture(turn))])
    assert [t for t in prompt.token_ids if t != token] == [
        t for t in prompt.engine_ids if t != token
    ]
    for data, original in zip(prompt.image_data, map(picture, range(4)), strict=True):
        sent = Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,"))))
        assert np.array_equal(np.asarray(sent), np.asarray(original))
    tensors = {
        id(tensor)
        for each in prompts
        for part in each.train_inputs.parts
        for tensor in part.values()
    }
    assert len(tensors) == 3 * 2, "the prompts of an episode share each picture's tensors"


def test_a_placeholder_written_as_text_stands_for_no_picture() -> None:
    encoder = encoder_of()
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = encoder.prompt([shown(picture(0), text=text)])
    assert len(prompt.image_data) == prompt.engine_ids.count(encoder.images.token_id) == 1
    assert encoder.prompt([user(text)]).train_inputs is None
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": text}}}]
    assert encoder.prompt(
        [shown(picture(0), text=text), {**answer(), "tool_calls": calls}, shown()]
    ).image_data


def test_an_engine_that_reads_tokens_as_text_sees_no_more_control_tokens() -> None:
    """SGLang decodes the tokens of a request with pictures and encodes the text again."""
    encoder, tokenizer = encoder_of(), chatml_tokenizer()
    attack = "".join(encoder.text.control)
    prompt = encoder.prompt([shown(picture(0), text=attack), answer(attack), shown(text=attack)])
    assert (
        tokenizer.encode(encoder.decode(prompt.engine_ids), add_special_tokens=False)
        == prompt.engine_ids
    )


def test_a_placeholder_that_the_model_spelled_is_masked_and_its_text_altered() -> None:
    """SGLang reads a prompt with images as text, and finds more placeholders than images."""
    encoder = encoder_of()
    ids = [
        *encoder.text.encode("I see <|image_pad|> and <|image_pad|>"),
        encoder.end_of_turn_ids[0],
    ]
    assert encoder.images.token_id not in ids
    altered = encoder.without_placeholders(
        Generation(ids, [-0.5] * len(ids), "", FinishReason.STOP)
    )
    assert (
        len(altered.token_ids) == len(ids)
        and not altered.trained
        and "<|image_pad|>" not in altered.text
    )
    assert encoder.answer_text(altered.token_ids).startswith("I see ?")
    prompt = encoder.append(
        encoder.prompt([shown(picture(0))]), altered.token_ids, [shown(picture(1))]
    )
    assert encoder.decode(prompt.engine_ids).count("<|image_pad|>") == len(prompt.image_data) == 2
    harmless = Generation(ids[:2], [-0.5] * 2, "", FinishReason.STOP)
    assert encoder.without_placeholders(harmless) is harmless


def with_template(template: str) -> Any:
    """The processor with another chat template."""
    own = processor()
    return type(own)(
        image_processor=own.image_processor, tokenizer=chatml_tokenizer(), chat_template=template
    )


def test_a_template_that_numbers_images_or_shows_none_is_refused() -> None:
    counted = CHAT_TEMPLATE.replace(
        "{%- macro render", "{%- set ic = namespace(n=0) -%}{%- macro render"
    ).replace(
        "<|vision_start|>",
        "{%- set ic.n = ic.n + 1 -%}{% if add_vision_id %}Picture {{ ic.n }}: {% endif "
        "%}<|vision_start|>",
    )
    numbered = with_template(counted)
    assert DeltaEncoder(chatml_tokenizer(), numbered).images is not None
    with pytest.raises(EncodingError, match=r"'Picture 1: .*'Picture 2: .*add_vision_id"):
        DeltaEncoder(chatml_tokenizer(), numbered, chat_template_kwargs={"add_vision_id": True})
    blind = with_template(CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", ""))
    with pytest.raises(EncodingError, match="picture"):
        DeltaEncoder(chatml_tokenizer(), blind).prompt([shown(picture(0))])


@every_processor
def test_a_checkpoints_processor_loads_without_torchvision(name: str, tmp_path: Path) -> None:
    own = processor(name)
    chatml_tokenizer().save_pretrained(tmp_path)
    settings_of = {**own.image_processor.to_dict(), "processor_class": name}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings_of, default=str))
    loaded = load_processor(str(tmp_path))
    image = picture(0, 100, 70)
    got = DeltaEncoder(loaded.tokenizer, loaded).prompt([shown(image)])
    expected = encoder_of(name).prompt([shown(image)])
    assert got.token_ids == expected.token_ids
    assert torch.equal(got.train_inputs["pixel_values"], expected.train_inputs["pixel_values"])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('{"processor_class": "NoSuchProcessor"}', "NoSuchProcessor"),
        ('{"processor_cl', "preprocessor_config.json"),
    ],
)
def test_a_processor_that_cannot_be_loaded_says_why(tmp_path: Path, config: str, told: str) -> None:
    chatml_tokenizer().save_pretrained(tmp_path)
    assert load_processor(str(tmp_path)) is None, "a checkpoint of text alone"
    (tmp_path / "preprocessor_config.json").write_text(config)
    with pytest.raises(EncodingError, match=told):
        load_processor(str(tmp_path))


def test_a_placeholder_that_expands_to_text_and_tokens_merges_with_its_neighbours() -> None:
    """Gemma 3 puts blank lines around a picture, which merge with line breaks beside it."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3 import image_processing_pil_gemma3

    tokenizer = real_tokenizer("gemma3")
    gemma = Gemma3Processor(
        image_processor=image_processing_pil_gemma3.Gemma3ImageProcessorPil(),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=16,
    )
    images = [picture(0), picture(1)]
    first = [
        {"type": "text", "text": "look\n"},
        {"type": "image", "image": images[0]},
        {"type": "text", "text": "key"},
    ]
    last = user([{"type": "image", "image": images[1]}])
    messages = [system(), user(first), answer(), last]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = gemma(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    prompt = DeltaEncoder(tokenizer, gemma).prompt(messages)
    assert prompt.token_ids == expected["input_ids"][0].tolist()
    assert torch.equal(prompt.train_inputs["pixel_values"], expected["pixel_values"])
