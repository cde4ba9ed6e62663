"""Tokens, masks and log-probs travel as arrays from the engine's answer to the training rank, without loss."""

import pickle
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.bridge.framework import Sample
from rollout.bridge.sample import SampleWriter, build_samples
from rollout.play.engine import parse_generation
from rollout.samples import convert_samples_to_train_data
from rollout.turn import FinishReason, Generation, Prompt, Segment, StopReason, Turn

ARGS = Namespace(rollout_top_p=1.0)


def answer(tokens: int) -> dict[str, Any]:
    entries = [[-0.1 * (k % 7), 2**31 - 1 - k, None] for k in range(tokens)]
    return {"text": "a", "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries}}


def turn(index: int, generation: Generation, prompt: int = 3) -> Turn:
    return Turn(
        *(1, index, Prompt(list(range(prompt))), generation, "go", True, "go", 1.0, False, False, None),
    )


def train_data(*generations: Generation, prompt: int = 3) -> tuple[list[Sample], dict[str, Any]]:
    turns = tuple(turn(k, generation, prompt) for k, generation in enumerate(generations))
    segment = Segment("task", turns, Prompt(list(range(5))), StopReason.CUT)
    (samples,) = build_samples([segment], list(range(len(turns))), SampleWriter(ARGS, 9))
    return samples, convert_samples_to_train_data(ARGS, samples)


def test_the_train_data_has_an_array_per_sample_with_the_engines_numbers() -> None:
    given = answer(600)
    _, data = train_data(parse_generation(given))
    log_probs, ids = zip(*((p, i) for p, i, _ in given["meta_info"]["output_token_logprobs"]), strict=True)
    assert [x.dtype for x in (data["tokens"][0], data["loss_masks"][0], data["rollout_log_probs"][0])] == [
        *(np.int32, np.uint8, np.float32),
    ]
    assert data["tokens"][0].tolist() == [0, 1, 2, *ids]
    assert data["rollout_log_probs"][0].tolist() == np.array(log_probs, np.float32).tolist()
    assert data["loss_masks"][0].tolist() == [1] * 600
    bootstrap = [data[key][1].tolist() for key in ("tokens", "loss_masks", "rollout_log_probs")]
    assert bootstrap == [[0, 1, 2, 3, 4, 9], [0], [0.0]]


def test_slime_makes_its_tensors_from_the_arrays_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    _, data = train_data(parse_generation(answer(4)))
    for key, dtype in (("tokens", torch.long), ("loss_masks", torch.int), ("rollout_log_probs", torch.float32)):
        for row in (data[key], pickle.loads(pickle.dumps(data[key], protocol=5))):
            assert row[0].flags.writeable
            assert torch.as_tensor(row[0], dtype=dtype).tolist() == torch.tensor(row[0].tolist(), dtype=dtype).tolist()
    assert not recwarn.list


def test_a_sample_reads_like_slimes_lists() -> None:
    (sample, _), _ = train_data(parse_generation(answer(300)))
    assert sample.tokens and sample.tokens[:3] == [0, 1, 2] and len(sample.tokens) == 303
    assert sample.tokens == [0, 1, 2, *(2**31 - 1 - k for k in range(300))]
    # slime sums the mask to get the number of trained tokens.
    assert sum(sample.loss_mask or ()) == 300 == len(sample.rollout_log_probs or ())
    assert pickle.loads(pickle.dumps(sample)).tokens == sample.tokens


def test_samples_whose_prompts_share_a_buffer_keep_their_own_tokens() -> None:
    prompt = Prompt(turn(0, parse_generation(answer(1))).prompt.token_ids)
    writer = SampleWriter(ARGS, 9)
    samples = [writer.new(k, 0, prompt) for k in range(3)]
    for k, sample in enumerate(samples):
        writer.append_generation(sample, Generation([10 + k] * (k + 1), [-1.0] * (k + 1), "x", FinishReason.STOP))
        writer.append_observation(sample, [7])
    assert [list(sample.tokens) for sample in samples] == [
        *([0, 1, 2, 10, 7], [0, 1, 2, 11, 11, 7], [0, 1, 2, 12, 12, 12, 7]),
    ]
    assert [sample.loss_mask for sample in samples] == [[1, 0], [1, 1, 0], [1, 1, 1, 0]]
    assert [list(sample.rollout_log_probs or ()) for sample in samples][2] == [-1.0, -1.0, -1.0, 0.0]


def test_an_altered_answer_is_masked_and_has_no_log_probs() -> None:
    generation = Generation([5, 6], [-0.5, -0.25], "x", FinishReason.STOP, trained=False)
    _, data = train_data(generation)
    assert data["loss_masks"][0].tolist() == [0, 0] and data["rollout_log_probs"][0].tolist() == [0.0, 0.0]
