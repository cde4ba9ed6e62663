"""Several processes play the batches of one in the critic's warm-up, in value pretraining and with
`stagger_turns`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import (
    ANSWERS,
    content,
    flat,
    place_of,
    places_of,
    playing,
    turn_bytes,
    turns_in,
    turns_of,
)
from tests.fixtures.scripted_engine import ScriptedEngine, draw
from tests.rollout.players.test_players import warm  # noqa: F401  (a fixture)

WARMUP: dict[str, Any] = {
    "critic_warmup": {"w_epoch": 2, "w_iter": 2, "fraction": 0.5},
    "num_critic_only_steps": 4,
    "rollout_batch_size": 32,
}
PRETRAINING: dict[str, Any] = {
    "value_pretraining": {"batches": 4},
    "n_env": 12,
    "num_critic_only_steps": 4,
    "num_rollout": 4,
    "history": "full",
}
"""The prompts of kept turns share memory with later ones."""
STAGGER: dict[str, Any] = {"stagger_turns": 24, "env": {"length_of": f"{__name__}.long"}}


def long(_seed: int) -> int:
    return 24


async def play(folder: Path, processes: int, batches: int, **keys: Any) -> list[Any]:
    """The first batches; the engine gets new weights once the actor is trained, and then answers
    otherwise.

    With several processes, one is killed in the middle of a batch, and one before the third, which
    may be drawn.
    """

    def answers(body: dict[str, Any], number: int) -> str:
        return ANSWERS[(draw(body, 5) + int(engine.version)) % 5]

    def killing(number: int) -> float:
        if processes > 1 and number == 17:
            asyncio.get_running_loop().create_task(run.kill(1))
        return 0.002 * (number % 3)

    engine = ScriptedEngine(chatml_tokenizer(), answers)
    engine.delay = killing
    given = {
        "env": {"max_length": 12},
        "turn_quota": "per_env",
        "rollout_processes": processes,
        **keys,
    }
    outputs: list[Any] = []
    async with playing(folder, engine, **given) as run:
        for number in range(batches):
            if processes > 1 and number == 2:
                await run.kill(0)
            outputs.append(await run.batch(number))
            if number + 1 > run.args.num_critic_only_steps:
                engine.update()
        died = (await run.runtime()).fault_counts()["player_died"]
    assert died == 2 * (processes > 1)
    assert sum(output.metrics.get("rollout/faults/episodes_failed", 0) for output in outputs) == 0
    return outputs


def versions(*outputs: Any) -> set[str]:
    return {version for sample in flat(*outputs) for version in sample.weight_versions}


@pytest.mark.parametrize(
    "keys",
    some([WARMUP, PRETRAINING, STAGGER], [PRETRAINING]),
    ids=["warm-up", "pretraining", "stagger"],
)
async def test_batches_are_those_of_one_process(tmp_path: Path, keys: dict[str, Any]) -> None:
    batches = keys.get("num_critic_only_steps", 4) + (keys is not PRETRAINING)
    alone = await play(tmp_path, 1, batches, **keys)
    wide = await play(tmp_path, 3, batches, **keys)
    assert [content(output) for output in alone] == [content(output) for output in wide]
    size = keys.get("rollout_batch_size", 24)
    expected = [size] * batches
    if keys is PRETRAINING:
        expected[-1] = 4 * size
    assert [sum(map(turns_in, turns_of(output))) for output in wide] == expected
    if keys is not STAGGER:
        assert versions(*wide[:4]) == {"1"}, "the policy is frozen"


@pytest.mark.slow
async def test_a_warm_up_that_shares_its_turns_has_exact_batches_and_the_turns_of_one_process(
    tmp_path: Path,
) -> None:
    runs = [
        await play(tmp_path, processes, 6, **WARMUP, turn_quota="global") for processes in (1, 3)
    ]
    played = []
    for outputs in runs:
        assert [len(turns_of(output)) for output in outputs] == [32] * 6
        kept = places_of(*outputs[:2])
        assert len(set(kept)) == 64, "no turn is kept twice"
        for drawn in outputs[2:4]:
            assert drawn.metrics["warmup/drawn_turns"] == 32.0
            assert len(set(places_of(drawn))) == 32 and set(places_of(drawn)) <= set(kept)
        assert versions(*outputs[:5]) == {"1"} and versions(outputs[5]) == {"2"}, (
            "until the actor is trained"
        )
        later = places_of(*outputs[:2], *outputs[4:])
        assert len(set(later)) == len(later) and all(
            k == 0 or (e, k - 1) in later for e, k in later
        )
        played.append({place_of(sample): turn_bytes(sample) for sample in turns_of(*outputs[:2])})
    both = played[0].keys() & played[1].keys()
    assert len(both) >= 32 and all(played[0][turn] == played[1][turn] for turn in both)
