"""Tokens, masks and log-probs travel as arrays from the engine's answer to the training rank,
without loss."""

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
IDS = [2**31 - 1 - k for k in range(600)]
LOG_PROBS = [-0.1 * (k % 7) for k in range(600)]


def made_of(generation: Generation) -> tuple[list[Sample], dict[str, Any]]:
    """The samples and train data of one turn, and of the state after it."""
    turn = Turn(1, 0, Prompt([0, 1, 2]), generation, reward=1.0)
    segment = Segment("task", (turn,), Prompt([0, 1, 2, 3, 4]), StopReason.CUT)
    (samples,) = build_samples([segment], [0], SampleWriter(ARGS, 9))
    return samples, convert_samples_to_train_data(ARGS, samples)


def test_the_engines_numbers_reach_slimes_tensors_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    entries = [[log_prob, token, None] for log_prob, token in zip(LOG_PROBS, IDS, strict=True)]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries}
    (sample, _), data = made_of(parse_generation({"text": "a", "meta_info": meta}))
    wanted = {
        "tokens": ([0, 1, 2, *IDS], [0, 1, 2, 3, 4, 9], np.int32, torch.long),
        "loss_masks": ([1] * 600, [0], np.uint8, torch.int),
        "rollout_log_probs": (
            np.array(LOG_PROBS, np.float32).tolist(),
            [0.0],
            np.float32,
            torch.float32,
        ),
    }
    for key, (turn, bootstrap, own, slimes) in wanted.items():
        assert [row.tolist() for row in data[key]] == [turn, bootstrap] and data[key][
            0
        ].dtype == own
        for row in (data[key][0], pickle.loads(pickle.dumps(data[key], protocol=5))[0]):
            assert row.flags.writeable
            assert torch.as_tensor(row, dtype=slimes).tolist() == turn
    assert not recwarn.list
    # slime reads a sample's columns as lists, and sums its mask to get the number of trained
    # tokens.
    assert sample.tokens[:3] == [0, 1, 2] and sample.tokens == wanted["tokens"][0]
    assert sum(sample.loss_mask or ()) == 600 == len(sample.rollout_log_probs or ())
    assert pickle.loads(pickle.dumps(sample)).tokens == sample.tokens


def test_samples_whose_prompts_share_a_buffer_keep_their_own_tokens() -> None:
    prompt = Prompt([0, 1, 2])
    writer = SampleWriter(ARGS, 9)
    samples = [writer.new(k, 0, prompt) for k in range(3)]
    for k, sample in enumerate(samples):
        writer.append_generation(
            sample, Generation([10 + k] * (k + 1), [-1.0] * (k + 1), "x", FinishReason.STOP)
        )
        writer.append_masked(sample, [7])
    for k, sample in enumerate(samples):
        assert list(sample.tokens) == [0, 1, 2, *[10 + k] * (k + 1), 7]
        assert sample.loss_mask == [1] * (k + 1) + [0]
        assert list(sample.rollout_log_probs or ()) == [-1.0] * (k + 1) + [0.0]
