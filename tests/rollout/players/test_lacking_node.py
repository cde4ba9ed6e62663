"""A player whose node lacks the environment's package: the others play its episodes, and a warning
names it."""

import socket
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import EnvironmentFault
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import Run, content, playing, plays, sample_bytes, warnings_with
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.rollout.players.test_players import LONG, warm  # noqa: F401  (warm is a fixture)

GAME = """
import os
from pathlib import Path
from envs.base import describe_task
from tests.fixtures import counting_env


def build_env(sample, args):
    if str(os.getpid()) in Path(__file__).with_name("lacking").read_text().split():
        with open(Path(__file__).with_name("tried"), "a") as file:
            file.write(f"{os.getpid()} {describe_task(sample)}\\n")
        import package_of_the_environment
    return counting_env.build_env(sample, args)
"""

BAD_SEEDS = """
def fail(sample):
    if describe_task(sample)[1] % 5 == 0:
        raise RuntimeError("this level cannot be built")
"""


class Lacking(Run):
    """A run whose environment can be imported in some players alone."""

    def __init__(self, folder: Path, engine: ScriptedEngine, **keys: Any) -> None:
        if not (folder / "game.py").exists():
            (folder / "game.py").write_text(GAME)
        self.lacking = folder / "lacking"
        self.lacking.write_text("")
        game = {
            "rollout_interaction_env_path": str(folder / "game.py"),
            "max_env_retries_per_turn": 0,
        }
        super().__init__(folder, engine, **{**LONG, **game, "n_env": 8, **keys})

    async def lack(self, *numbers: int) -> None:
        pids = await (await self.players()).start()
        self.lacking.write_text(" ".join(str(pids[number]) for number in numbers))


def lacking(folder: Path, processes: int, script: Any = plays, **keys: Any) -> Any:
    return playing(folder, script, Lacking, rollout_processes=processes, **keys)


async def assert_does_not_open(run: Lacking) -> None:
    """One more episode fails; the error names the package."""
    with pytest.raises(EnvironmentFault, match="package_of_the_environment"):
        await (await run.players()).open(run.source.episode(1000))


async def test_the_batches_are_those_of_one_process_and_one_warning_names_each_such_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[list[Any]] = []
    for processes in (1, 4):
        engine = ScriptedEngine(chatml_tokenizer(), plays)
        engine.delay = lambda number: 0.005
        keys = {"env": {"max_length": 6}, "max_episode_failures_per_batch": 0}
        async with lacking(tmp_path, processes, engine, **keys) as run:
            if processes > 1:
                await run.lack(0, 2)
            runs.append([await run.batch(number) for number in range(3)])
    assert content(*runs[0]) == content(*runs[1])
    told = warnings_with("no environment starts", caplog)
    assert len(told) == 2 and all("package_of_the_environment" in words for words in told)
    for number in (0, 2):
        assert any(
            f"rollout process {number} on {socket.gethostname()}: " in words for words in told
        )
    failed = [output.metrics["rollout/faults/env_raised"] for output in runs[1]]
    tried = (tmp_path / "tried").read_text().splitlines()
    assert failed == [len(tried), 0, 0] and failed[0] >= 2, (
        "only the first episodes are tried there"
    )
    assert len(set(tried)) == len(tried), "and none of them twice in one process"


async def test_no_held_out_episode_is_missing(tmp_path: Path) -> None:
    results = []
    for processes in (1, 3):
        async with lacking(
            tmp_path, processes, eval={"episodes": 12, "max_turns": 8}, n_env=6
        ) as run:
            if processes > 1:
                await run.lack(0)
            output = await run.evaluation()
        results.append(
            (output.metrics, [sample_bytes(sample) for sample in output.data["count"]["samples"]])
        )
    assert results[0] == results[1]


async def test_an_environment_that_breaks_where_others_have_started_is_not_tried_elsewhere(
    tmp_path: Path,
) -> None:
    async with lacking(tmp_path, 2, env={"max_length": 3}) as run:
        await run.batch(0)
        await run.lack(0, 1)
        await assert_does_not_open(run)
        assert (await run.players()).faults["env_raised"] == 1


@pytest.mark.slow
async def test_a_successor_that_lacks_the_package_gives_its_episodes_to_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if a killed player were started again on another node. The episodes that it played go on
    elsewhere."""
    runs: list[list[Any]] = []
    for processes in (1, 3):
        async with lacking(tmp_path, processes, max_episode_failures_per_batch=0) as run:
            outputs = [await run.batch(0)]
            if processes > 1:
                players = await run.players()
                await run.kill(1)
                (await players.live(players._places[1])).name = "the successor"
                run.lacking.write_text(str(players._places[1].pid))
            runs.append([*outputs, await run.batch(1), await run.batch(2)])
    assert content(*runs[0]) == content(*runs[1])
    told = warnings_with("no environment starts", caplog)
    assert (
        len(told) == 1 and "the successor: " in told[0] and "package_of_the_environment" in told[0]
    )


async def test_episodes_that_start_nowhere_are_blamed_on_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = f"{BAD_SEEDS}{GAME}".replace("return counting", "fail(sample)\n    return counting")
    (tmp_path / "game.py").write_text(broken)
    keys = {"eval": {"episodes": 9, "max_turns": 8}, "max_episode_failures_per_batch": 9}
    async with lacking(tmp_path, 3, **keys) as run:
        output = await run.evaluation()
        await run.batch(0)
        places = (await run.players())._places
        assert all(place.started and not place.avoided_until for place in places)
    assert 0 < output.metrics["eval/count/episodes_failed"] < 9
    assert "no environment starts" not in caplog.text


async def test_after_a_death_one_broken_episode_keeps_none_from_the_successor(
    tmp_path: Path,
) -> None:
    async with lacking(tmp_path, 2) as run:
        await run.batch(0)
        await run.kill(1)
        await run.batch(1)
        await run.lack(0, 1)
        await assert_does_not_open(run)
        run.lacking.write_text("")
        assert all(
            place.started and not place.avoided_until for place in (await run.players())._places
        )
