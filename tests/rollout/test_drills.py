"""Drills: faults in a fifth of all environment steps, and weight loads that hit answers in
flight."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from embedded.engine.decoder import load_hf_model
from embedded.engine.engine import EngineOptions
from embedded.engine.process import EngineProcess
from embedded.warmstart.policy import PolicySize, build_policy, save_policy, train_tokenizer
from rollout import continuous, fixed_turn
from rollout.play.runtime import close_runtimes
from tests.cases import some
from tests.fixtures.playing import Run, no_gap_and_none_twice, places_of, playing, turns_of
from tests.fixtures.trainer import TURNS, updated_engine
from tests.fixtures.warm_python import warm_engines

BATCHES = 3


@pytest.mark.slow
@pytest.mark.parametrize("quota", ["global", "per_env"])
async def test_batches_are_exact_while_a_fifth_of_all_steps_raise_hang_or_die(
    tmp_path: Path, quota: str
) -> None:
    """`history: window`. Each fault is counted, no turn is lost or played twice, and no episode is
    given up for it."""
    faults = tmp_path / "faults"
    faults.mkdir()
    keys = {
        "env_backend": "process",
        "env_workers": 2,
        "env_step_timeout_s": 1.5,
        "turn_quota": quota,
        "n_env": 8,
    }
    env = {"max_length": 40, "fault_share": 0.2, "faults": str(faults)}
    async with playing(
        tmp_path, updated_engine(), env=env, max_env_retries_per_turn=20, **keys
    ) as run:
        outputs = [await run.batch(number) for number in range(BATCHES)]
    counted: Counter[str] = Counter()
    for output in outputs:
        assert len(turns_of(output)) == TURNS
        counted.update(
            {name: int(value) for name, value in output.metrics.items() if "/faults/" in name}
        )
    played = places_of(*outputs)
    no_gap_and_none_twice(played)
    made = Counter(path.name.partition("-")[0] for path in faults.iterdir())
    assert sum(made.values()) > 0.1 * len(played) and len(made) == 3
    assert counted["rollout/faults/env_raised"] == made["raise"]
    assert counted["rollout/faults/env_worker_died"] == made["die"]
    assert counted["rollout/faults/env_timeout"] >= made["hang"]
    assert counted["rollout/faults/episodes_failed"] == 0
    assert counted["rollout/faults/env_replayed"] >= sum(made.values())


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy, whose answers are noise."""
    folder = tmp_path_factory.mktemp("policy")
    texts = ["a wall stands to the left\nseed 1 count 2", "left right 1234567890"] * 4
    tokenizer = train_tokenizer(texts, ["Current Observation:\n"])
    size = PolicySize(layers=1, hidden=32, heads=2, kv_heads=2, ffn=32, context=1024)
    save_policy(build_policy(tokenizer, size, seed=1), tokenizer, folder)
    return folder


@pytest.mark.parametrize(
    "play",
    some([fixed_turn.collect, continuous.collect], [continuous.collect]),
    ids=["fixed-turn", "continuous"],
)
async def test_weight_loads_that_abort_answers_in_flight_lose_no_turn(
    tmp_path: Path, policy: Path, play: fixed_turn.Collect
) -> None:
    """The embedded engine gets new weights over and over, as slime sends them; each turn is of one
    version."""
    with (
        warm_engines(),
        EngineProcess(EngineOptions(model_path=str(policy), max_running_requests=8)) as engine,
    ):
        state = load_hf_model(str(policy)).state_dict()
        keys: dict[str, Any] = {
            "hf_checkpoint": str(policy),
            "n_env": 8,
            "max_staleness": 4,
            "max_turn_retries": 1000,
        }
        keys |= {
            "env": {"max_length": 40},
            "rollout_max_response_len": 24,
            "sglang_router_port": engine.port,
        }
        run, played, aborted, loads = Run(tmp_path, **keys), list[tuple[int, int]](), 0.0, 0
        try:
            while aborted == 0 or loads < BATCHES:
                batch = asyncio.create_task(run.batch(loads, play))
                await asyncio.wait([batch], timeout=0.01 * (loads % 25))  # anywhere in the batch
                loads += 1
                await asyncio.to_thread(engine.update_weights, state, str(loads))
                output = await batch
                turns = turns_of(output)
                assert len(turns) == TURNS and {len(s.weight_versions) for s in turns} == {1}
                played += places_of(output)
                aborted += output.metrics["rollout/faults/turns_aborted"]
                assert output.metrics["turn/staleness_max"] <= 4 and loads < 250
        finally:
            await close_runtimes()
    no_gap_and_none_twice(played)
