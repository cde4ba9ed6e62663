"""Every sample carries the rollout data that training replays; missing data is an error."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

from rollout.bridge.sample import SampleWriter, build_samples
from rollout.errors import ConfigError
from rollout.samples import convert_samples_to_train_data
from rollout.turn import FinishReason, Generation, Prompt, Segment, StopReason, Turn

MOE = Namespace(use_rollout_routing_replay=True, num_layers=2, moe_router_topk=3, rollout_top_p=0.9)


def turn(**meta: Any) -> Turn:
    generation = Generation([5, 6], [-0.1, -0.2], "ab", FinishReason.STOP, ("3",), meta)
    return Turn(0, 0, Prompt([1, 2, 3]), generation, reward=1.0)


def cut(task: str) -> Segment:
    return Segment(task, (turn(),), Prompt([1, 2, 3, 4]), StopReason.CUT)


def test_a_bootstrap_sample_has_placeholders_for_everything_that_is_replayed() -> None:
    (samples,) = build_samples([cut("t")], [0], SampleWriter(MOE, 9))
    bootstrap = samples[-1]
    assert bootstrap.rollout_routed_experts.shape == (4, 2, 3)
    assert (bootstrap.rollout_routed_experts != 0).any(), (
        "slime takes all zeros for a broken capture"
    )
    assert list(bootstrap.rollout_top_p_token_offsets) == [0, 0]


def test_replay_data_that_the_engine_did_not_return_is_an_error() -> None:
    (samples,) = build_samples([cut("t")], [0], SampleWriter(MOE, 9))
    with pytest.raises(ConfigError, match="rollout_routed_experts, but 1 of 2 samples have none"):
        convert_samples_to_train_data(MOE, samples)


def test_log_probs_that_the_loss_needs_and_the_engine_did_not_return_are_an_error() -> None:
    args = Namespace(use_rollout_logprobs=True)
    (samples,) = build_samples([cut("t")], [0], SampleWriter(args, 9))
    convert_samples_to_train_data(args, samples)
    samples[0].rollout_log_probs = None
    with pytest.raises(
        ConfigError, match="rollout_log_probs, but 1 of 2.*leave --use-rollout-logprobs out"
    ):
        convert_samples_to_train_data(args, samples)


def test_an_altered_answer_is_masked_and_has_neither_log_probs_nor_a_record_of_kept_tokens() -> (
    None
):
    altered = replace(turn(), generation=replace(turn().generation, trained=False))
    (samples,) = build_samples(
        [Segment("t", (altered,), None, StopReason.TERMINATED)], [0], SampleWriter(MOE, 9)
    )
    assert samples[0].loss_mask == [0, 0] and list(samples[0].rollout_log_probs) == [0.0, 0.0]
    assert list(samples[0].rollout_top_p_token_offsets) == [0, 0, 0]
