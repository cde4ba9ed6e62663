"""The policy's tokenizer encodes any text, and loads back as it was saved."""

import unicodedata
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from embedded.warmstart.policy import fixed_phrases, train_tokenizer

MESSAGES = [
    {"role": "system", "content": "go to the red ball"},
    {"role": "user", "content": "Current Observation:\na wall 2 steps forward"},
]
BYTES_ONLY = train_tokenizer(["turn left"], ["a phrase\n"])


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    # Like Qwen2's, the tokenizer composes accents first (NFC).
    assert BYTES_ONLY.decode(BYTES_ONLY.encode(text)) == unicodedata.normalize("NFC", text)


def test_auto_classes_load_what_was_saved(policy_folder: Path, tokenizer: Any) -> None:
    loaded = AutoTokenizer.from_pretrained(policy_folder)
    for text in ("THINK: a red ball 1 step left\nACTION: go forward<|im_end|>", "Zürich 42 Ω"):
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\ngo to the red ball<|im_end|>\n<|im_start|>user\nCurrent "
        "Observation:\na wall 2 steps forward<|im_end|>\n<|im_start|>assistant\n"
    )
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    assert model.config.vocab_size >= len(loaded)
    assert (
        loaded.convert_ids_to_tokens(model.config.eos_token_id) == "<|im_end|>" == loaded.eos_token
    )


def test_a_phrase_and_a_number_are_one_token_each(tokenizer: Any) -> None:
    assert len(tokenizer.encode("Current Observation:\n")) == 1
    assert len(tokenizer.encode(" 2")) == 1


def test_the_chat_template_shows_tools_beside_the_system_message_and_earlier_calls(
    tokenizer: Any,
) -> None:
    """Agents send calls back as objects."""
    tool = {"type": "function", "function": {"name": "look", "description": "look around"}}
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "the door"}}}
    answer = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    messages = [*MESSAGES, answer, {"role": "tool", "content": "a"}]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert text.count("<|im_start|>system") == 1
    assert "go to the red ball" in text and '"look around"' in text
    assert (
        'I look.<tool_call>{"name": "look", "arguments": {"at": "the door"}}</tool_call><|im_end|>'
        in text
    )


def test_fixed_phrases_are_what_messages_of_one_kind_share() -> None:
    def talk(thing: str) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": f"Find the {thing}.\nBe quick."},
            {"role": "user", "content": f"Current:\n{thing}\n\nAnswer now."},
        ]

    assert fixed_phrases([talk("ball"), talk("key")]) == [
        "Find the",
        "\nBe quick.",
        "Current:\n",
        "\n\nAnswer now.",
    ]
