"""Drills: faults in a fifth of all environment steps, and weight loads that hit answers in flight."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from embedded.engine.decoder import load_hf_model
from embedded.engine.engine import EngineOptions
from embedded.engine.process import EngineProcess
from embedded.warmstart.policy import PolicySize, build_policy, save_policy, train_tokenizer
from rollout import continuous, fixed_turn
from rollout.data_source import EpisodeSource
from rollout.play.runtime import close_runtimes
from tests.cases import some
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.warm_python import warm_engines
from tests.rollout.test_continuous import TURNS, Engine, no_gap_and_none_twice

BATCHES = 3


@pytest.mark.parametrize("quota", some(["global", "per_env"], ["global"]))
async def test_batches_are_exact_while_a_fifth_of_all_steps_raise_hang_or_die(tmp_path: Path, quota: str) -> None:
    """`history: window`. Each fault is counted, no turn is lost or played twice, and no episode is given up for it."""
    faults = tmp_path / "faults"
    faults.mkdir()
    played: list[tuple[int, int]] = []
    counted: Counter[str] = Counter()
    async with Engine() as engine:
        keys = {"env_backend": "process", "env_workers": 4, "env_step_timeout_s": 2.0, "turn_quota": quota, "n_env": 8}
        env = {"max_length": 40, "fault_share": 0.2, "faults": str(faults)}
        args = rollout_args(tmp_path, engine.port, env=env, max_env_retries_per_turn=20, **keys)
        source = EpisodeSource(args)
        try:
            for number in range(BATCHES):
                output = await fixed_turn.collect_or_draw(args, number, source)
                turns = [s for group in output.samples for s in group if s.metadata["kind"] == "turn"]
                assert len(turns) == TURNS
                played += [(s.metadata["episode_id"], s.metadata["round_number"]) for s in turns]
                counted.update({name: int(value) for name, value in output.metrics.items() if "/faults/" in name})
        finally:
            await close_runtimes()
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
    "play", some([fixed_turn.collect, continuous.collect], [continuous.collect]), ids=["fixed-turn", "continuous"]
)
async def test_weight_loads_that_abort_answers_in_flight_lose_no_turn(
    tmp_path: Path, policy: Path, play: fixed_turn.Collect
) -> None:
    """The embedded engine gets new weights over and over, as slime sends them; each turn is of one version."""
    with warm_engines(), EngineProcess(EngineOptions(model_path=str(policy), max_running_requests=8)) as engine:
        state = load_hf_model(str(policy)).state_dict()
        keys = {"hf_checkpoint": str(policy), "n_env": 8, "max_staleness": 4, "max_turn_retries": 1000}
        args = rollout_args(tmp_path, engine.port, env={"max_length": 40}, rollout_max_response_len=24, **keys)
        source, played, aborted, loads = EpisodeSource(args), list[tuple[int, int]](), 0.0, 0
        try:
            while aborted == 0 or loads < BATCHES:
                batch = asyncio.create_task(fixed_turn.collect_or_draw(args, loads, source, play))
                await asyncio.wait([batch], timeout=0.01 * (loads % 25))  # anywhere in the batch
                loads += 1
                await asyncio.to_thread(engine.update_weights, state, str(loads))
                output = await batch
                turns = [s for group in output.samples for s in group if s.metadata["kind"] == "turn"]
                assert len(turns) == TURNS and {len(s.weight_versions) for s in turns} == {1}
                played += [(s.metadata["episode_id"], s.metadata["round_number"]) for s in turns]
                aborted += output.metrics["rollout/faults/turns_aborted"]
                assert output.metrics["turn/staleness_max"] <= 4 and loads < 250
        finally:
            await close_runtimes()
    no_gap_and_none_twice(played)
