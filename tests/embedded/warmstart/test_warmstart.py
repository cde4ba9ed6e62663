"""Demonstrations have the prompts of a rollout, and imitation learns them."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")
pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from embedded.trainer import megatron
from embedded.warmstart.demonstrations import demonstrate, think
from embedded.warmstart.imitation import (
    WarmStart,
    encode,
    imitate,
    join_turns,
    make_policy,
    thin,
)
from embedded.warmstart.policy import CHAT_TEMPLATE, PolicySize, train_tokenizer
from envs.babyai import BabyAI
from rollout.bridge.settings import load_settings
from rollout.errors import ConfigError
from rollout.play.build import encoders_of

SHORTENED = (
    "(message.content.split('</think>')[-1] if message.role == 'assistant' else message.content) +"
)
SMALL = PolicySize(layers=1, hidden=32, heads=2, kv_heads=2, ffn=64)


def config(**keys: Any) -> Any:
    given = {
        "rollout_interaction_env_path": "envs.babyai",
        "env": {"num_dists": 0},
        "tasks": ["goto"],
        **keys,
    }
    return load_settings(SimpleNamespace(**given))


def recall(max_steps: int, **keys: Any) -> Any:
    """Settings of the game whose fact must be remembered."""
    game = {"rollout_interaction_env_path": "envs.recall", "env": {"max_steps": max_steps}}
    return config(**game, tasks=["recall"], **keys)


def test_the_same_seed_gives_the_same_demonstrations() -> None:
    assert (
        demonstrate(config(), 2, 0.5, 3)
        == demonstrate(config(), 2, 0.5, 3)
        != demonstrate(config(), 2, 0.5, 4)
    )


def test_demonstrated_notes_name_the_facts_of_the_environment() -> None:
    memory = {"kind": "notes", "every": 10, "keep": 0, "max_tokens": 8}
    turns = demonstrate(recall(50, memory=memory), 1, 0.0, 1)
    notes = [turn for turn in turns if "ACTION" not in turn.response]
    assert len(turns) == 54 and len({turn.response for turn in notes}) == 1
    for turn in notes:
        assert turn.messages[-1]["content"].endswith("Notes are cut after 8 tokens.")
    assert f"Your notes:\n{notes[0].response}\n" in turns[-1].messages[-1]["content"]
    without_facts = demonstrate(config(memory=memory | {"every": 1}), 1, 0.0, 1)
    assert all("ACTION" in turn.response for turn in without_facts)


def test_a_demonstrated_conversation_grows_until_it_is_compacted() -> None:
    memory = {"kind": "notes", "free": 64, "keep": 2, "times": 99, "max_tokens": 8}
    turns = demonstrate(recall(100, history="full", memory=memory), 1, 0.0, 1)
    compacted = 0
    for before, after in pairwise(turns):
        grown = [*before.messages, {"role": "assistant", "content": before.response}]
        if "ACTION" in before.response:
            assert (
                after.messages[: len(grown)] == grown
                or "Notes are cut" in after.messages[-1]["content"]
            )
        else:
            compacted += 1
            assert f"Your notes:\n{before.response}" in str(after.messages[:2]).replace("\\n", "\n")
            assert len(after.messages) == 2 + 2 * 2
    assert compacted > 1 and len(turns) == 100 + compacted
    plain = demonstrate(recall(100, history="full"), 1, 0.0, 1)
    assert len(plain) == 100 and len(plain[-1].messages) >= 199


def test_demonstrations_write_inline_notes_when_these_lack_a_fact() -> None:
    memory = {"kind": "inline_notes", "n": 0, "notes_chars": 60}
    for turns in (demonstrate(recall(25, memory=memory), 1, share, 1) for share in (0.0, 1.0)):
        first = re.fullmatch(r"NOTES: (\w+)\nTHINK: .*\nACTION: \w+", turns[0].response)
        assert first is not None and turns[0].valid
        assert all("NOTES" not in turn.response for turn in turns[1:])
        assert all(
            f"Your notes:\n{first[1]}\n" in turn.messages[-1]["content"] for turn in turns[1:]
        )
    assert all(
        "NOTES" not in turn.response for turn in demonstrate(config(memory=memory), 1, 0.0, 1)
    )


@pytest.mark.parametrize(
    ("mission", "observation", "thought"),
    [
        (
            "go to the red ball",
            "a wall 2 steps left\na red ball 1 step right",
            "red ball 1 step right",
        ),
        ("pick up a blue box", "a blue key 1 step left", "no blue box here"),
    ],
)
def test_a_thought_says_where_the_wanted_thing_is(
    mission: str, observation: str, thought: str
) -> None:
    assert think(mission, observation) == thought


def test_imitation_makes_a_folder_whose_policy_answers_like_the_demonstrations(
    tmp_path: Path,
) -> None:
    settings = WarmStart(episodes=4, random_share=0.5, epochs=12, lr=1e-2, batch_size=8, size=SMALL)
    once = make_policy(
        config(), tmp_path / "one", WarmStart(**{**vars(settings), "epochs": 1}), 0
    ).loss
    more = make_policy(config(), tmp_path / "six", settings, 0).loss
    assert more < 0.7 * once
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "six")
    turns = demonstrate(config(), 4, 0.5, 0)
    data = encode(tokenizer, turns, config(), "cpu")
    for turn, tokens, n in zip(turns, data["tokens"], data["response_lengths"], strict=True):
        assert tokenizer.decode(tokens[-n:]) == turn.response + "<|im_end|>"
        text = tokenizer.apply_chat_template(
            turn.messages, add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(tokens[:-n]) == text


@pytest.mark.parametrize(
    "keys", [{"chat_template_kwargs": {"mood": "brief"}}, {"use_inference_chat_template": True}]
)
def test_imitation_and_rollout_encode_the_same_prompt(tmp_path: Path, keys: dict[str, Any]) -> None:
    settings, tokenizer = config(**keys), train_tokenizer(["go forward"])
    # Earlier answers lose what stands before </think>, as in Qwen3's template.
    tokenizer.chat_template = "{{ mood }}" + CHAT_TEMPLATE.replace("message.content +", SHORTENED)
    tokenizer.save_pretrained(tmp_path)
    messages = [
        {"role": role, "content": f"<think>hm</think>{role}"}
        for role in ("user", "assistant", "user")
    ]
    turn = replace(demonstrate(settings, 1, 0.0, 0)[0], messages=messages)
    (tokens,), (length,) = (
        encode(tokenizer, [turn], settings, "cpu")[key] for key in ("tokens", "response_lengths")
    )
    prompt = tokens[:-length].tolist()
    assert prompt == list(encoders_of(str(tmp_path), settings)().prompt(messages).token_ids)
    assert prompt != list(encoders_of(str(tmp_path), config())().prompt(messages).token_ids)


def test_an_imitated_answer_does_not_begin_with_the_token_that_begins_a_text() -> None:
    tokenizer, turns = train_tokenizer(["go forward"]), demonstrate(config(), 1, 0.0, 0)
    begin = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.convert_tokens_to_ids(begin))]
    )
    assert tokenizer.decode(tokenizer.encode("go")) == f"{begin}go"
    data = encode(tokenizer, turns, config(), "cpu")
    assert (
        tokenizer.decode(data["tokens"][0][-data["response_lengths"][0] :])
        == turns[0].response + "<|im_end|>"
    )


def test_turns_of_a_conversation_share_a_sample_and_are_learned_as_before(tmp_path: Path) -> None:
    memory = {"kind": "notes", "free": 64, "keep": 2, "times": 99, "max_tokens": 8}
    settings = recall(60, history="full", memory=memory)
    turns = demonstrate(settings, 1, 0.5, 1)
    make_policy(settings, tmp_path, WarmStart(episodes=1, epochs=1, size=SMALL), 0)
    data = encode(AutoTokenizer.from_pretrained(tmp_path), turns, settings, "cpu")
    alone = join_turns(data, 1)
    joined = join_turns(data, len(turns))
    assert torch.equal(learned(alone), learned(joined))
    assert sum(joined["turns"]) == len(turns) > 4 * len(joined["turns"])
    assert sum(joined["total_lengths"]) < sum(alone["total_lengths"]) / 4
    assert max(join_turns(data, 8)["turns"]) == 8
    one_step = WarmStart(epochs=1, batch_size=len(turns), max_tokens=100_000)
    alone_loss, alone_gradients = imitated(tmp_path, alone, one_step)
    loss, gradients = imitated(tmp_path, joined, one_step)
    assert loss == pytest.approx(alone_loss, rel=1e-5)
    assert gradients.norm() > 0.1
    assert (gradients - alone_gradients).norm() < 1e-5 * gradients.norm()


def learned(samples: Any) -> torch.Tensor:
    """Return the tokens that are learned, in order."""
    columns = (samples[key] for key in ("tokens", "response_lengths", "loss_masks"))
    return torch.cat([ids[-length:][mask > 0] for ids, length, mask in zip(*columns, strict=True)])


def imitated(policy: Path, samples: Any, settings: WarmStart) -> tuple[float, torch.Tensor]:
    """Imitate from a saved policy; returns the loss and the last step's gradients."""
    model = megatron.build_model(str(policy), megatron.initialize())
    loss = imitate(model, samples, settings, 0)
    gradients = [weights.grad for weights in model.parameters()]
    return loss, torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


@pytest.mark.slow
def test_the_default_imitation_learns_the_thoughts_of_a_hard_seed(tmp_path: Path) -> None:
    """Random actions alone cost 0.17 nats per token; in steps of 32 turns, seed 2 stayed at 0.20
    and PPO failed."""
    assert make_policy(config(), tmp_path, WarmStart(), 2).loss < 0.185


def test_what_cannot_be_demonstrated_is_refused() -> None:
    with pytest.raises(ConfigError, match="no expert_action"):
        demonstrate(
            config(rollout_interaction_env_path="tests.fixtures.counting_env", env={}), 1, 0.0, 0
        )


def test_thinning_out_does_not_miss_what_comes_in_every_fourth_turn() -> None:
    samples = {"total_lengths": [10] * 4000, "turn": list(range(4000))}
    kept = thin(samples, 10_000, 0)["turn"]
    assert len(kept) == 1000 and kept == sorted(set(kept))
    assert all(200 < sum(turn % 4 == rest for turn in kept) < 300 for rest in range(4))
    assert thin(samples, 40_000, 0) == samples


def test_numpys_scalars_in_info_are_demonstrated_as_they_are_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = BabyAI.step

    def with_scalars(env: BabyAI, response_text: str) -> Any:
        observation, done, info = step(env, response_text)
        scalars = {"terminated": np.bool_(info["terminated"]), "reward": np.float32(0.5)}
        return observation, np.bool_(done), {**info, **scalars}

    played = demonstrate(config(), 1, 0.0, 0)
    monkeypatch.setattr(BabyAI, "step", with_scalars)
    assert demonstrate(config(), 1, 0.0, 0) == played
