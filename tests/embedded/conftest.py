"""What the embedded tests share: a tiny random policy with its own tokenizer, and a server over
it."""

import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from advantage.turn_table import TABLE_KEY, TurnKind, TurnRow, TurnSpan, encode_row
from embedded.arguments import EmbeddedFlags
from embedded.engine.engine import EngineOptions
from embedded.engine.server import EngineServer
from embedded.warmstart.policy import PolicySize, build_policy, save_policy, train_tokenizer
from slime_verlog import merge, read_settings
from tests.fixtures.warm_python import warm_engines

ROOT = Path(__file__).parents[2]
TEXTS = (
    "a wall 2 steps forward\na red ball 1 step left",
    "go to the red ball",
    "turn left go forward turn right",
) * 4
SIZE = PolicySize(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, context=256)
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WARM = {
    "episodes": 2,
    "epochs": 1,
    "size": {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 64},
}
"""Fields of `WarmStart` for a run far too short to learn."""
QUICKSTART = yaml.safe_load((ROOT / "custom_configs" / "quickstart.yaml").read_text())
OFF_POLICY = {
    "use_rollout_logprobs": True,
    "eps_clip": 0.3,
    "eps_clip_high": 5.0,
    "eps_clip_c": None,
}
DIS = {"policy_loss": "dis", **OFF_POLICY}
KL_LOSS = {"kl_coef": 0.0, "use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "low_var_kl"}
BINS = {"value_loss": "hl_gauss", "value_bins": 21, "value_range": [-1.0, 1.0]}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _warm_engines() -> Iterator[None]:
    with warm_engines():
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer(TEXTS, ["Current Observation:\n"])


def sharpen(model: Any, scale: float = 6.0) -> Any:
    """Make a random model opinionated, so that tests on its choices are not tests on ties."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale) if parameter.dim() > 1 else parameter.add_(
                0.1 * torch.randn_like(parameter)
            )
    return model


SHAPES = ["qwen2", "qwen2 tied", "llama", "qwen3"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def model_of_shape(shape: str, tokenizer: Any) -> Any:
    """A random model; `llama3 rope` has rotary embeddings that the trainer does not take."""
    torch.manual_seed(3)
    end = {"eos_token_id": tokenizer.eos_token_id}
    if shape.startswith("qwen2"):
        model = build_policy(tokenizer, SIZE)
        model.config.tie_word_embeddings = shape == "qwen2 tied"
        return sharpen(type(model)(model.config))
    if shape.startswith("llama"):
        rope = {"rope_parameters": LLAMA3_ROPE} if shape == "llama3 rope" else {}
        return sharpen(LlamaForCausalLM(LlamaConfig(**SHAPE, **end, **rope)))
    return sharpen(Qwen3ForCausalLM(Qwen3Config(**SHAPE, **end, head_dim=24)))


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    save_policy(sharpen(build_policy(tokenizer, SIZE, seed=1)), tokenizer, folder)
    return folder


def serve(folder: Path, at_once: int = 8) -> EngineServer:
    """An engine with the model in the folder, which is closed at the end of its context."""
    return EngineServer(EngineOptions(model_path=str(folder), max_running_requests=at_once))


@pytest.fixture(scope="module")
def server(policy_folder: Path) -> Iterator[EngineServer]:
    with serve(policy_folder) as running:
        yield running


def trainer_args(**overrides: Any) -> Any:
    """slime's flags with the embedded defaults, and the YAML's keys with theirs."""
    small = {
        "hf_checkpoint": "policy",
        "global_batch_size": 4,
        "num_critic_only_steps": 0,
        "max_tokens_per_gpu": 256,
    }
    return Namespace(
        **{
            **read_settings(EmbeddedFlags, small).model_dump(),
            "gamma_step": 0.99,
            "lambda_step": 0.95,
            "gamma_token": 1.0,
            "lambda_token": 1.0,
            **overrides,
        }
    )


def made_up_batch(turns: int = 8, seed: int = 0, *, dummy: int = 5) -> dict[str, Any]:
    """Train data as the converter gives it: two episodes, the first cut and bootstrapped, the
    second terminated."""
    rng = random.Random(seed)
    data: dict[str, list[Any]] = {
        key: [] for key in ("tokens", "response_lengths", "loss_masks", "rewards")
    }
    rows, groups, log_probs = [], [], []

    def add(
        prompt: int, answer: list[int], mask: int, group: int, row: TurnRow, reward: float
    ) -> None:
        data["tokens"].append([rng.randrange(250) for _ in range(prompt)] + answer)
        data["response_lengths"].append(len(answer))
        data["loss_masks"].append([mask] * len(answer))
        data["rewards"].append(reward)
        log_probs.append([-rng.random() for _ in answer])
        groups.append(group)
        rows.append(encode_row(row))

    half = turns // 2
    for turn in range(turns):
        length, reward, last = rng.randrange(1, 9), rng.choice([-0.1, 0.0, 1.0]), turn == turns - 1
        segment, index = divmod(turn, half)
        row = TurnRow(segment, index, TurnKind.TURN, last, False, (TurnSpan(0, length, reward),))
        add(
            rng.randrange(5, 30),
            [rng.randrange(250) for _ in range(length)],
            1,
            100 + turn,
            row,
            reward,
        )
    add(17, [dummy], 0, 100 + half - 1, TurnRow(0, half, TurnKind.BOOTSTRAP), 0.0)
    totals: dict[int, int] = {}
    for group, mask in zip(groups, data["loss_masks"], strict=True):
        totals[group] = totals.get(group, 0) + sum(mask)
    return {
        **data,
        "rollout_log_probs": log_probs,
        "sample_indices": groups,
        TABLE_KEY: rows,
        "rollout_ids": groups,
        "rollout_mask_sums": [totals[group] for group in groups],
    }


def small_config(folder: Path, **keys: Any) -> str:
    """The quickstart's YAML with four slots, short episodes and these keys."""
    path = folder / "small.yaml"
    shorter = {"env": {"max_steps": 5}, "n_env": 4, **keys}
    path.write_text(yaml.safe_dump(merge(QUICKSTART, shorter)))
    return str(path)


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """What a study of tiny runs shares, as its YAML file would say it."""
    flags = {
        "rollout_batch_size": 8,
        "global_batch_size": 4,
        "rollout_max_response_len": 6,
        "num_critic_only_steps": 1,
    }
    return {
        "name": "tiny",
        "question": "Which?",
        "config": small_config(tmp_path),
        "seeds": [0],
        "updates": 2,
        "eval_episodes": 2,
        "eval_interval": 1,
        "flags": flags,
        "warm": WARM,
        "variants": {"v": {}},
    }
