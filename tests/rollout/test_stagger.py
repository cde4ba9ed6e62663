"""`stagger_turns`: slots that begin together come to different turns of their episodes, and no turn
is lost."""

from pathlib import Path
from typing import Any

import pytest

from rollout.bridge.checks import CONTINUOUS, GENERATE
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError
from tests.cases import some
from tests.fixtures.playing import flat, places_of, playing
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.warm_python import warm_players

LENGTH = 16


def sixteen(_seed: int) -> int:
    return LENGTH


async def play(folder: Path, batches: int, **keys: Any) -> list[Any]:
    """Batches of 8 turns: two for each of 4 slots, whose episodes last 16 turns."""
    game = {"length_of": f"{__name__}.sixteen"}
    sizes = {"rollout_batch_size": 8, "global_batch_size": 8, "turn_quota": "per_env", "n_env": 4}
    async with playing(
        folder, lambda body, number: "ACTION: left", env=game, **sizes, **keys
    ) as run:
        return [await run.batch(k) for k in range(batches)]


@pytest.mark.parametrize("processes", some([1, 2], [1]))
async def test_slots_spread_over_the_episode_and_given_up_episodes_are_bootstrapped(
    processes: int, tmp_path: Path
) -> None:
    with warm_players():
        together = await play(tmp_path, 12, rollout_processes=processes)
        staggered = await play(tmp_path, 12, rollout_processes=processes, stagger_turns=LENGTH)
    numbers = [
        [{turn for _, turn in places_of(output)} for output in outputs]
        for outputs in (together, staggered)
    ]
    assert all(len(found) == 2 for found in numbers[0]), (
        "without it, all slots are at the same turns"
    )
    assert all(len(found) == 8 for found in numbers[1][8:]), (
        "with it, each of the slots is elsewhere"
    )
    played = places_of(*staggered)
    assert len(set(played)) == len(played) == 96
    last = {episode: max(k for e, k in played if e == episode) for episode, _ in played}
    assert [last[slot] + 1 for slot in range(4)] == [4, 8, 12, 16], (
        "first episodes end after 1/4, 2/4, 3/4 and 4/4"
    )
    given_up = [
        s.metadata["episode_id"] for s in flat(*staggered) if s.metadata["kind"] == "bootstrap"
    ]
    assert {0, 1, 2} <= set(given_up), "their last state has a bootstrap sample"


@pytest.mark.parametrize(
    "keys", [{"rollout_function_path": CONTINUOUS}, {"custom_generate_function_path": GENERATE}]
)
def test_other_ways_to_play_refuse_it(keys: dict[str, str], tmp_path: Path) -> None:
    given = {"rollout_function_path": None, **keys}
    with pytest.raises(
        ConfigError, match=r"stagger_turns needs --rollout-function-path rollout\.fixed_turn\."
    ):
        EpisodeSource(rollout_args(tmp_path, 1, stagger_turns=16, **given))
