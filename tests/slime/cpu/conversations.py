"""A rollout function of made-up conversations: slime trains on the same turns, whatever shares a
sample."""

import os
import random
from collections.abc import Sequence
from typing import Any

from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import RolloutFnTrainOutput
from rollout.bridge.sample import SampleWriter, build_samples
from rollout.bridge.settings import load_settings
from rollout.turn import FinishReason, Generation, Prompt, Segment, StopReason, Turn
from tests.fixtures.conversations import DUMMY, conversations


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """One batch that depends on `rollout_id` alone."""
    turns = RolloutFlags.read(args).turns_per_batch
    segments, groups = conversations(
        random.Random(rollout_id), 3, turns, first_group=turns * rollout_id
    )
    return _output(args, segments, groups)


def generate_conversation(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    """One episode whose prompts only grow, by `$CONVERSATION_TOKENS` tokens in each turn."""
    rng, turns = random.Random(rollout_id), RolloutFlags.read(args).turns_per_batch
    size = int(os.environ["CONVERSATION_TOKENS"])
    prompt = [rng.randrange(DUMMY) for _ in range(size)]
    played: list[Turn] = []
    for index in range(turns):
        answer = [rng.randrange(DUMMY) for _ in range(size // 3)]
        generation = Generation(answer, [-1.0] * len(answer), "", FinishReason.STOP)
        played.append(
            Turn(
                0,
                index,
                Prompt(prompt),
                generation,
                reward=rng.random(),
                terminated=index == turns - 1,
            )
        )
        prompt = [*prompt, *answer, *(rng.randrange(DUMMY) for _ in range(size - len(answer)))]
    segment = Segment("conversation", tuple(played), None, StopReason.TERMINATED)
    return _output(args, [segment], list(range(turns * rollout_id, turns * (rollout_id + 1))))


def _output(args: Any, segments: Sequence[Segment], groups: Sequence[int]) -> RolloutFnTrainOutput:
    writer = SampleWriter(args, DUMMY, chains=load_settings(args).samples == "chains")
    return RolloutFnTrainOutput(samples=build_samples(segments, groups, writer), metrics={})
