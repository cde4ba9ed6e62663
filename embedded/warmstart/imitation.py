"""Make the policy that training starts from: a tokenizer, and weights that imitate
demonstrations."""

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from embedded.arguments import EmbeddedFlags, OptimizerFlags
from embedded.engine.decoder import load_hf_model, write_policy
from embedded.run.folder import write_text
from embedded.trainer import megatron
from embedded.trainer.batches import RolloutData, micro_batches
from embedded.trainer.losses import log_probs_and_entropy
from embedded.warmstart.demonstrations import Demonstration, demonstrate
from embedded.warmstart.policy import (
    PolicySize,
    build_policy,
    fixed_phrases,
    save_policy,
    train_tokenizer,
)
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.settings import RolloutSettings
from rollout.tokens.encoding import DeltaEncoder
from slime_verlog import ConfigError, Field, Settings

OPTIMIZER = OptimizerFlags(weight_decay=0.01, lr_decay_style="cosine")

IMITATION_FILE = "imitation.json"
"""File beside the policy with its `Imitation`."""


class WarmStart(Settings):
    """How the policy learns from demonstrations.

    Demonstrated actions are mostly random on purpose: they teach the meaning of words and the
    format of answers, and leave it to PPO to learn what to do. With a quarter of the actions
    random, imitation alone wins 98 % of the quickstart's episodes.
    """

    episodes: int = Field(default=40, ge=1)
    """Demonstrated episodes."""
    env: Mapping[str, Any] = {}
    """Settings of the environment for the demonstrations; they win over the run's. Variants of a
    study whose environments differ share one policy if these make their demonstrations equal."""
    max_turns: int = Field(default=100, ge=1)
    """Turns after which a demonstrated episode is cut."""
    epoch_tokens: int = Field(default=300_000, ge=1)
    """Tokens per epoch, prompts included; turns beyond that are left out at random. Where a prompt
    repeats the turn before it, as with `history: full`, up to `batch_size` turns share a prompt."""
    random_share: float = Field(default=0.85, ge=0, le=1)
    """Probability that a demonstrated action is random instead of the expert's."""
    epochs: int = Field(default=5, ge=1)
    """Passes over the demonstrations."""
    least_steps: int = Field(default=0, ge=0)
    """Optimizer steps at least; few demonstrations are passed over more often than `epochs`."""
    batch_size: int = Field(default=8, ge=1)
    """Turns per optimizer step. With 32, some seeds do not learn to name what they see
    (docs/results/quickstart.md)."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate at the start; it falls to 0 along a cosine."""
    max_tokens: int = Field(default=2048, ge=1)
    """Tokens per micro-batch."""
    model: str | None = None
    """Hugging Face folder whose model imitates, with its own tokenizer; default: a new policy of
    `size`."""
    bf16: bool = False
    """Multiply in bfloat16, as slime's flag of that name."""
    size: PolicySize = PolicySize()
    """Shape of the policy."""


@dataclass(frozen=True)
class Imitation:
    """What the demonstrations and their imitation came to."""

    loss: float
    """The last epoch's mean loss per token, in nats."""
    longest_prompt: int
    """Tokens of the longest demonstrated prompt."""
    longest_answer: int
    """Tokens of the longest demonstrated answer, its end included."""
    mean_turns: float = 0.0
    """Turns per demonstrated episode."""
    unfinished: float = 0.0
    """Share of the demonstrated episodes that were cut before their end."""
    same_thoughts: float = 0.0
    """Share of the demonstrated episodes of several turns in which every thought is the same."""

    def lengths(self, flags: EmbeddedFlags) -> dict[str, int]:
        """Return the flags that limit lengths, larger where demonstrations come near them."""
        answer = max(flags.rollout_max_response_len, _round_up(1.5 * self.longest_answer, 8))
        context = max(
            flags.rollout_max_context_len or 0, _round_up(1.25 * self.longest_prompt + answer, 64)
        )
        return {"rollout_max_response_len": answer, "rollout_max_context_len": context}


def read_imitation(folder: str | Path) -> Imitation:
    """Read the `Imitation` of a policy that `make_policy` wrote."""
    return Imitation(**json.loads((Path(folder) / IMITATION_FILE).read_text(encoding="utf-8")))


def make_policy(
    config: RolloutSettings,
    folder: str | Path,
    settings: WarmStart,
    seed: int,
    flags: RolloutFlags | None = None,
) -> Imitation:
    """Demonstrate, train a tokenizer, imitate, and write a Hugging Face folder.

    With `settings.model`, start from that folder's model and tokenizer, which are not changed.
    Raises ConfigError if there is nothing to imitate, answers are rejected, the model is not
    supported, or a first prompt does not fit.
    """
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    given = load_hf_model(settings.model) if settings.model else None
    turns = _demonstrate(config, settings, seed)
    if given is None:
        texts = [message["content"] for turn in turns for message in turn.messages]
        texts += [turn.response for turn in turns]
        tokenizer = train_tokenizer(texts, fixed_phrases(turn.messages for turn in turns), 1024)
    else:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
    data = encode(tokenizer, turns, config, megatron.initialize())
    totals = data["total_lengths"]
    answers = data["response_lengths"]
    prompts = [total - answer for total, answer in zip(totals, answers, strict=True)]
    for turn, tokens in zip(turns, prompts, strict=True):
        if turn.turn == 0:
            (flags or RolloutFlags()).check_first_prompt(turn.task, tokens, config)
    if given is None:
        context = max(settings.size.context, _round_up(1.5 * max(totals) + 64, 1024))
        model = build_policy(tokenizer, settings.size.model_copy(update={"context": context}), seed)
    else:
        model = given
    save_policy(model, tokenizer, folder)
    actor = megatron.build_model(folder, megatron.initialize(), bf16=settings.bf16)
    samples = join_turns(data, settings.batch_size)
    loss = imitate(actor, thin(samples, settings.epoch_tokens, seed), settings, seed)
    write_policy(folder, megatron.megatron_to_hf(actor.state_dict(), model.config), Path(folder))
    imitation = Imitation(loss, max(prompts), max(answers), **statistics_of(turns))
    write_text(Path(folder) / IMITATION_FILE, json.dumps(vars(imitation)) + "\n")
    return imitation


def _demonstrate(config: RolloutSettings, settings: WarmStart, seed: int) -> list[Demonstration]:
    """Play the demonstrations, at random without an expert; raises ConfigError if most answers are
    rejected."""
    config = config.model_copy(update={"env": {**config.env, **settings.env}})
    turns = demonstrate(
        config,
        settings.episodes,
        settings.random_share,
        seed,
        needs_expert=False,
        most_turns=settings.max_turns,
    )
    rejected = [turn for turn in turns if not turn.valid]
    if 2 * len(rejected) > len(turns):
        raise ConfigError(
            f"task {rejected[0].task!r} rejects {len(rejected)} of {len(turns)} demonstrated "
            f"answers, such as {rejected[0].response!r}; step() must accept each of env.actions, "
            "and each action of expert_action(env), after 'ACTION:'"
        )
    return turns


def _round_up(number: float, step: int) -> int:
    return math.ceil(number / step) * step


def thin(samples: RolloutData, epoch_tokens: int, seed: int) -> RolloutData:
    """Return as many of the samples, in their order, as have about `epoch_tokens` tokens.

    They are chosen at random: evenly spaced ones would miss what comes in every so many turns.
    """
    count = len(samples["total_lengths"])
    step = max(1, math.ceil(sum(samples["total_lengths"]) / epoch_tokens))
    chosen = sorted(random.Random(f"thin/{seed}").sample(range(count), math.ceil(count / step)))
    return {key: [values[place] for place in chosen] for key, values in samples.items()}


def statistics_of(turns: Sequence[Demonstration]) -> dict[str, float]:
    """Summarize what the demonstrations say about the run, as fields of `Imitation`."""
    episodes: dict[tuple[str, int], list[Demonstration]] = defaultdict(list)
    for turn in turns:
        episodes[turn.task, turn.seed].append(turn)
    cut = [episode for episode in episodes.values() if not episode[0].finished]
    thoughts = []
    for episode in episodes.values():
        if len(episode) > 1:
            thoughts.append({turn.response.partition("\nACTION:")[0] for turn in episode})
    same = [found for found in thoughts if len(found) == 1]
    return {
        "mean_turns": len(turns) / len(episodes),
        "unfinished": len(cut) / len(episodes),
        "same_thoughts": len(same) / max(len(thoughts), 1),
    }


def encode(
    tokenizer: Any, turns: Sequence[Demonstration], keys: RolloutSettings, device: torch.device
) -> RolloutData:
    """Encode prompts exactly as the rollout does, and end each response with the end-of-turn
    token."""
    encoder = DeltaEncoder(
        tokenizer,
        chat_template_kwargs=keys.chat_template_kwargs,
        use_inference_chat_template=keys.use_inference_chat_template,
    )
    tokens = []
    lengths = []
    for turn in turns:
        response = tokenizer.encode(turn.response, add_special_tokens=False)
        response.append(encoder.end_of_turn_ids[0])
        prompt = encoder.prompt(turn.messages).token_ids
        tokens.append(torch.tensor([*prompt, *response], device=device))
        lengths.append(len(response))
    return {
        "tokens": tokens,
        "response_lengths": lengths,
        "total_lengths": [len(t) for t in tokens],
    }


def join_turns(data: RolloutData, most: int) -> RolloutData:
    """Make one sample of successive turns, `most` at most, whose prompts repeat the turn before
    them.

    A sample's `loss_masks` are 1 on what the model answers; `turns` counts its turns.
    """
    samples: RolloutData = {key: [] for key in (*data, "loss_masks", "turns")}
    for tokens, length in zip(data["tokens"], data["response_lengths"], strict=True):
        mask = torch.ones(length, device=tokens.device)
        turns = 1
        last = samples["tokens"][-1] if samples["tokens"] else tokens
        if (
            len(last) < len(tokens)
            and samples["turns"][-1] < most
            and torch.equal(tokens[: len(last)], last)
        ):
            between = mask.new_zeros(len(tokens) - len(last) - length)
            mask = torch.cat([samples["loss_masks"][-1], between, mask])
            turns += samples["turns"][-1]
            for values in samples.values():
                values.pop()
        samples["tokens"].append(tokens)
        samples["total_lengths"].append(len(tokens))
        samples["response_lengths"].append(len(mask))
        samples["loss_masks"].append(mask)
        samples["turns"].append(turns)
    return samples


def imitate(model: megatron.GPTModel, data: RolloutData, settings: WarmStart, seed: int) -> float:
    """Maximize the likelihood of the responses, with samples of `join_turns`; returns the last
    epoch's mean loss per token, in nats."""
    order = list(range(len(data["tokens"])))
    rng = random.Random(seed)
    # An epoch may have one step less if its last sample has several turns.
    per_epoch = math.ceil(sum(data["turns"]) / settings.batch_size)
    epochs = max(settings.epochs, math.ceil(settings.least_steps / per_epoch))
    total = epochs * per_epoch
    mean = math.nan
    optimizer = megatron.Adam(model, OPTIMIZER, settings.lr, total)
    with tqdm(total=total, desc="warm start", unit="step", leave=False, disable=None) as progress:
        for _ in range(epochs):
            rng.shuffle(order)
            losses = []
            for samples in _steps(order, data["turns"], settings.batch_size):
                optimizer.zero_grad()
                losses.append(_backward(model, data, samples, settings.max_tokens))
                optimizer.clip()
                optimizer.step()
                optimizer.schedule.step(1)
                progress.update()
            mean = sum(losses) / len(losses)
            progress.set_postfix(loss=f"{mean:.3f}")
    return mean


def _steps(order: Sequence[int], turns: Sequence[int], size: int) -> Iterator[list[int]]:
    """Cut an order of samples into steps of about `size` turns."""
    before = accumulate((turns[i] for i in order), initial=0)
    numbered = zip(before, order, strict=False)
    for _, step in groupby(numbered, key=lambda pair: pair[0] // size):
        yield [i for _, i in step]


def _backward(
    model: megatron.GPTModel, data: RolloutData, samples: Sequence[int], max_tokens: int
) -> float:
    """Add up the gradients of the mean loss per token of these samples, which is returned, in
    nats."""
    tokens = sum(data["loss_masks"][i].sum().item() for i in samples)
    total = 0.0
    for batch in micro_batches(data, samples, max_tokens):
        with megatron.precision(model):
            # The logits get no name: they are large, and would live until the next batch.
            log_probs, _ = log_probs_and_entropy(
                megatron.predict(model, batch.ids, batch.row, batch.column), batch.targets, 1.0
            )
            loss = -(log_probs * batch.gather(data["loss_masks"])).sum() / tokens
            loss.backward()
        total += loss.item()
    return total
