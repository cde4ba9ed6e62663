"""Drills: faults in a fifth of all environment steps, and weight loads that hit answers in flight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rollout.data_source import EpisodeSource
from rollout.fixed_turn import collect_or_draw
from rollout.play.runtime import close_runtimes
from tests.fixtures.rollout_args import rollout_args
from tests.rollout.test_continuous import TURNS, Engine, no_gap_and_none_twice

BATCHES = 3


@pytest.mark.parametrize("quota", ["global", "per_env"])
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
                output = await collect_or_draw(args, number, source)
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
