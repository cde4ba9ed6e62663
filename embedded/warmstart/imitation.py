"""Make the policy that training starts from: a tokenizer, and weights that imitate demonstrations."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from embedded.arguments import OptimizerFlags
from embedded.engine.decoder import load_hf_model
from embedded.trainer.batches import RolloutData, micro_batches
from embedded.trainer.losses import log_probs_and_entropy
from embedded.trainer.megatron import Adam, GPTModel, build_model, build_optimizer, initialize, predict
from embedded.trainer.weights import megatron_shapes, megatron_to_hf
from embedded.warmstart.demonstrations import Demonstration, demonstrate
from embedded.warmstart.policy import PolicySize, build_policy, save_policy
from embedded.warmstart.tokenizer import fixed_phrases, train_tokenizer
from rollout.bridge.settings import RolloutSettings
from rollout.tokens.encoding import DeltaEncoder
from slime_verlog import Field, Settings

OPTIMIZER = OptimizerFlags(weight_decay=0.01, lr_decay_style="cosine")


class WarmStart(Settings):
    """How the policy learns from demonstrations.

    Demonstrated actions are mostly random on purpose: they teach the meaning of words and the format of answers, and
    leave it to PPO to learn what to do. With a quarter of the actions random, imitation alone wins 98 % of the
    quickstart's episodes.
    """

    episodes: int = Field(default=40, ge=1)
    """Demonstrated episodes."""
    random_share: float = Field(default=0.85, ge=0, le=1)
    """Probability that a demonstrated action is random instead of the expert's."""
    epochs: int = Field(default=5, ge=1)
    """Passes over the demonstrations."""
    batch_size: int = Field(default=32, ge=1)
    """Turns per optimizer step."""
    lr: float = Field(default=2e-3, gt=0)
    """Learning rate at the start; it falls to 0 along a cosine."""
    max_tokens: int = Field(default=1 << 14, ge=1)
    """Tokens per micro-batch."""
    size: PolicySize = PolicySize()
    """Shape of the policy."""


def make_policy(config: RolloutSettings, folder: str | Path, settings: WarmStart, seed: int) -> float:
    """Demonstrate, train a tokenizer, imitate, and write a Hugging Face folder.

    Returns:
        The last epoch's mean loss per token, in nats.

    Raises:
        ConfigError: the environment has no expert to demonstrate it.
    """
    turns = demonstrate(config, settings.episodes, settings.random_share, seed)
    tokenizer = train_tokenizer(
        [message["content"] for turn in turns for message in turn.messages] + [turn.answer for turn in turns],
        fixed_phrases(turn.messages for turn in turns),
    )
    return _imitate_into(folder, build_policy(tokenizer, settings.size, seed), tokenizer, turns, settings, seed)


def adapt_policy(
    config: RolloutSettings, source: str | Path, folder: str | Path, settings: WarmStart, seed: int
) -> float:
    """Like `make_policy`, but starting from the model and tokenizer in `source`, which are not changed.

    Raises:
        ConfigError: the environment has no expert to demonstrate it, or the model's shape is not supported.
    """
    from transformers import AutoTokenizer

    model = load_hf_model(source)
    turns = demonstrate(config, settings.episodes, settings.random_share, seed)
    return _imitate_into(folder, model, AutoTokenizer.from_pretrained(source), turns, settings, seed)


def _imitate_into(
    folder: str | Path, model: Any, tokenizer: Any, turns: Sequence[Demonstration], settings: WarmStart, seed: int
) -> float:
    """Train the model on the demonstrations as a Megatron model, and write it with its tokenizer to `folder`."""
    save_policy(model, tokenizer, folder)
    device = initialize()
    actor = build_model(folder, device)
    loss = imitate(actor, encode(tokenizer, turns, device), settings, seed)
    # A head that is tied to the embeddings has no weights in the state.
    tied = model.config.tie_word_embeddings
    model.load_state_dict(megatron_to_hf(actor.state_dict(), megatron_shapes(model.config)), strict=not tied)
    save_policy(model, tokenizer, folder)
    return loss


def encode(tokenizer: Any, turns: Sequence[Demonstration], device: torch.device) -> RolloutData:
    """Encode prompts exactly as the rollout does, and end each answer with the end-of-turn token."""
    encoder = DeltaEncoder(tokenizer)
    end = encoder.end_of_turn_ids[0]
    tokens, lengths = [], []
    for turn in turns:
        answer = [*tokenizer.encode(turn.answer), end]
        tokens.append(torch.tensor([*encoder.prompt(turn.messages).token_ids, *answer], device=device))
        lengths.append(len(answer))
    return {"tokens": tokens, "response_lengths": lengths, "total_lengths": [len(t) for t in tokens]}


def imitate(model: GPTModel, data: RolloutData, settings: WarmStart, seed: int) -> float:
    """Maximize the likelihood of the answers; returns the last epoch's mean loss per token, in nats."""
    order, rng = list(range(len(data["tokens"]))), random.Random(seed)
    total, mean = settings.epochs * math.ceil(len(order) / settings.batch_size), math.nan
    optimizer = build_optimizer(model, OPTIMIZER, settings.lr, total)
    with tqdm(total=total, desc="warm start", unit="step", leave=False) as progress:
        for _ in range(settings.epochs):
            rng.shuffle(order)
            losses = []
            for start in range(0, len(order), settings.batch_size):
                step = order[start : start + settings.batch_size]
                losses.append(_imitation_step(model, optimizer, data, step, settings.max_tokens))
                optimizer.schedule.step(1)
                progress.update()
            mean = sum(losses) / len(losses)
            progress.set_postfix(loss=f"{mean:.3f}")
    return mean


def _imitation_step(
    model: GPTModel, optimizer: Adam, data: RolloutData, samples: Sequence[int], max_tokens: int
) -> float:
    optimizer.zero_grad()
    total = sum(data["response_lengths"][i] for i in samples)
    loss_sum = 0.0
    for batch in micro_batches(data, samples, max_tokens):
        log_probs, _ = log_probs_and_entropy(predict(model, batch.ids, batch.row, batch.column), batch.targets, 1.0)
        loss = -log_probs.sum() / total
        loss.backward()
        loss_sum += loss.item()
    optimizer.step()
    return loss_sum
