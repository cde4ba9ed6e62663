"""The policy that training starts from: a tokenizer and weights that imitate demonstrations."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from embedded.engine.decoder import load_hf_model
from embedded.trainer.batches import RolloutData, micro_batches
from embedded.trainer.losses import log_probs_and_entropy
from embedded.trainer.megatron import build_model, build_optimizer, initialize, predict
from embedded.trainer.weights import megatron_shapes, megatron_to_hf
from embedded.warmstart.demonstrations import Demonstration, demonstrate
from embedded.warmstart.policy import PolicySize, build_policy, save_policy
from embedded.warmstart.tokenizer import fixed_phrases, train_tokenizer
from rollout.bridge.settings import RolloutSettings
from rollout.tokens.encoding import DeltaEncoder

ADAM = SimpleNamespace(
    weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.98, adam_eps=1e-8, clip_grad=1.0, lr_decay_style="cosine"
)


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """How the policy is made: demonstrations, passes over them, learning rate (cosine to zero).

    Play is mostly random on purpose: it teaches what words mean and how an answer looks, and leaves to PPO what to
    do. With a quarter of random actions the imitation alone wins 98 % of the quickstart's episodes.
    """

    episodes: int = 40
    random_share: float = 0.85
    epochs: int = 5
    batch_size: int = 32
    lr: float = 2e-3
    max_tokens: int = 1 << 14
    """Tokens a micro-batch."""
    size: PolicySize = field(default_factory=PolicySize)


def make_policy(config: RolloutSettings, folder: str | Path, settings: WarmStart, seed: int) -> float:
    """Demonstrate, train a tokenizer, imitate, and write a Hugging Face folder; returns the last epoch's loss.

    Raises:
        ConfigError: the environment cannot be demonstrated.
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
    """Like `make_policy`, from the model and the tokenizer in `source`, which stay as they are.

    Raises:
        ConfigError: the environment cannot be demonstrated, or the model is of a shape that is not served.
    """
    from transformers import AutoTokenizer

    model = load_hf_model(source)
    turns = demonstrate(config, settings.episodes, settings.random_share, seed)
    return _imitate_into(folder, model, AutoTokenizer.from_pretrained(source), turns, settings, seed)


def _imitate_into(
    folder: str | Path, model: Any, tokenizer: Any, turns: Sequence[Demonstration], settings: WarmStart, seed: int
) -> float:
    """Write model and tokenizer to `folder`, after they learned the demonstrations in Megatron's form."""
    save_policy(model, tokenizer, folder)
    device = initialize()
    actor = build_model(folder, device)
    loss = imitate(actor, encode(tokenizer, turns, device), settings, seed)
    # A head that is tied to the embeddings has no weights of its own.
    tied = model.config.tie_word_embeddings
    model.load_state_dict(megatron_to_hf(actor.state_dict(), megatron_shapes(model.config)), strict=not tied)
    save_policy(model, tokenizer, folder)
    return loss


def encode(tokenizer: Any, turns: Sequence[Demonstration], device: torch.device) -> RolloutData:
    """Prompts as the rollout encodes them, answers closed by the end-of-turn token."""
    encoder = DeltaEncoder(tokenizer)
    end = encoder.end_of_turn_ids[0]
    tokens, lengths = [], []
    for turn in turns:
        answer = [*tokenizer.encode(turn.answer), end]
        tokens.append(torch.tensor(encoder.prompt(turn.messages).token_ids + answer, device=device))
        lengths.append(len(answer))
    return {"tokens": tokens, "response_lengths": lengths, "total_lengths": [len(t) for t in tokens]}


def imitate(model: Any, data: RolloutData, settings: WarmStart, seed: int) -> float:
    """Raise the likelihood of the answers' tokens; returns the last epoch's mean loss a token, in nats."""
    order, rng = list(range(len(data["tokens"]))), random.Random(seed)
    total, mean = settings.epochs * math.ceil(len(order) / settings.batch_size), math.nan
    optimizer = build_optimizer(model, ADAM, settings.lr, total)
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


def _imitation_step(model: Any, optimizer: Any, data: RolloutData, samples: Sequence[int], max_tokens: int) -> float:
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
