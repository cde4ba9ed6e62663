"""Every batch logs the same metrics, and each is computed as documented."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.batches.load import warn_of_bottleneck
from rollout.batches.metrics import BatchLoad, batch_metrics, quantile
from rollout.data_source import EpisodeSource
from rollout.play.clock import WeightClock
from rollout.play.engine_loads import EngineLoad
from rollout.play.parts import FAULTS
from rollout.turn import FinishReason, Generation, Prompt, Segment, StopReason, Turn
from rollout.workers.utilization import ProcessUsage, Usage
from tests.fixtures.rollout_args import rollout_args

IDLE = BatchLoad(Usage(0.0, 0.0, 0.0), Usage(0.0, 0.0, 0.0), 0.0)


def turn(versions: tuple[str, ...] = ("3",), valid: bool = True) -> Turn:
    generation = Generation([5, 6], [-0.1, -0.2], "ab", FinishReason.STOP, versions)
    prompt = Prompt([1, 2])
    return Turn(0, 0, prompt, generation, valid=valid, reward=0.5, engine_s=0.2, env_s=0.1)


def segment(stop: str, turns: int, played: int | None = None, task: str = "count") -> Segment:
    return Segment(
        task, tuple(turn() for _ in range(turns)), None, StopReason(stop), 1.0, played or turns
    )


def test_a_batch_logs_its_turns_and_how_its_episodes_ended() -> None:
    segments = [
        segment("terminated", 2, 7),
        segment("max_turns", 3),
        segment("cut", 4),
        segment("failed", 1),
    ]
    faults = Counter(
        episodes_failed=2, turns_aborted=3, engine_http_503=2, engine_timeout=1, env_raised=1
    )
    faults["env_replayed"] = 1
    metrics = batch_metrics(segments, faults, IDLE, [])
    expected = {
        "turns": 10,
        "episodes_finished": 2,
        "episodes_cut": 1,
        "episodes_failed": 2,
        "turns_retried": 7,
    }
    assert {name: metrics[f"rollout/{name}"] for name in expected} == expected
    stops = {segment.stop for segment in segments}
    assert {stop for stop in StopReason if metrics[f"rollout/stop/{stop}"] == 1.0} == stops
    assert sum(metrics[f"rollout/stop/{stop}"] for stop in StopReason) == len(stops)
    assert (metrics["rollout/faults/engine_http_503"], metrics["rollout/faults/env_timeout"]) == (
        2.0,
        0.0,
    )


def test_the_lengths_of_ended_episodes_are_given_as_a_distribution() -> None:
    segments = [segment("terminated", 1, length) for length in range(1, 101)] + [
        segment("cut", 1, 900)
    ]
    metrics = batch_metrics(segments, Counter(), IDLE, [])
    names = ("mean", "p50", "p95", "max")
    assert [metrics[f"rollout/episode_turns_{name}"] for name in names] == [50.5, 50.0, 95.0, 100.0]
    assert quantile([], 0.5) == 0.0 and quantile([4.0], 0.95) == 4.0


def test_busy_shares_queues_and_host_time_are_those_of_the_batch() -> None:
    load = BatchLoad(Usage(10.0, 8.0, 30.0), Usage(10.0, 5.0, 20.0), 0.02)
    metrics = batch_metrics([segment("cut", 4)], Counter(), load, [])
    names = (
        "engine_busy_share",
        "engine_concurrency",
        "env_busy_share",
        "env_queue_depth",
        "turns_per_s",
    )
    assert [metrics[f"rollout/{name}"] for name in names] == [0.8, 3.0, 0.5, 2.0, 0.4]
    times = [metrics[f"turn/{name}"] for name in ("engine_s", "env_s", "host_s")]
    assert times == pytest.approx([0.2, 0.1, 0.005])


def used(cpu_s: float, waiting_s: float = 0.0) -> ProcessUsage:
    return ProcessUsage(Usage(20.0, 20.0, 200.0), Usage(20.0, 10.0, waiting_s), cpu_s, 3)


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        ([used(4.0), used(19.0), used(12.0)], "raise rollout_processes"),
        ([used(4.0, 120.0)], "raise env_workers"),
        # Environments that start in the background while the slots wait for the engine.
        ([used(4.0, 120.0), {"asked_s": 150.0}], ""),
        ([used(4.0), used(4.0), {"stood_s": 110.0}], "max_staleness"),
        ([used(4.0), used(4.0), {"engines": [(4, 3), (2, 1)]}], "4 wait"),
    ],
)
def test_a_bottleneck_is_named_once_with_the_setting_that_relieves_it(
    processes: list[Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    more = processes.pop() if isinstance(processes[-1], dict) else {}
    runtime: Any = SimpleNamespace(settings=SimpleNamespace(n_env=8, max_staleness=1), warned=set())
    engines = {number: EngineLoad(*counts) for number, counts in enumerate(more.get("engines", ()))}
    env = Usage(20.0, 10.0, sum(one.env.request_s for one in processes))
    load = BatchLoad(Usage(20.0, 20.0, more.get("asked_s", 20.0)), env, 1.0, processes, engines)
    for _ in range(2):
        warn_of_bottleneck(runtime, load, more.get("stood_s", 0.0))
    assert len(caplog.messages) == bool(said) and said in caplog.text


def test_staleness_counts_the_updates_between_playing_and_training() -> None:
    turns = (turn(("5",)), turn(("3", "4")), turn(("5",)), turn(("step-7",)))
    metrics = batch_metrics(
        [Segment("count", turns, None, StopReason.CUT)], Counter(), IDLE, [0, 2, 0, -1]
    )
    assert (metrics["turn/staleness"], metrics["turn/staleness_max"]) == (pytest.approx(2 / 3), 2.0)
    assert metrics["turn/off_policy_ratio"] == pytest.approx(1 / 3)
    assert metrics["turn/mixed_weights_ratio"] == 0.25


@pytest.mark.parametrize("script", ["train.py", "train_async.py"])
@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [0, 1, 2, 20])
def test_the_clock_follows_both_of_slimes_loops_from_any_beginning(
    script: str, interval: int, start: int
) -> None:
    """slime counts pushes in absolute rollout ids, and only in train_async.py."""
    clock, versions = WeightClock(interval), {1: start}
    for rollout in range(start, start + 20):
        if script == "train.py" and rollout > start:
            versions[len(versions) + 1] = rollout  # the push after rollout - 1
        elif rollout > start + 1 and (rollout - 1) % interval == 0:
            versions[len(versions) + 1] = rollout - 1  # the push after rollout - 2
        now = len(versions)
        clock.learn(rollout, now, asked_since=True)
        assert [clock.updates_in(version) for version in versions] == list(versions.values())
        assert clock.pushes_before(rollout) <= now - 1
        assert (
            clock.after_each is None or clock.after_each == (script == "train.py") or interval == 1
        )


@pytest.mark.parametrize(("script", "column"), [("train.py", 1), ("train_async.py", 5)])
def test_the_clock_agrees_with_the_table_in_its_docstring(script: str, column: int) -> None:
    assert WeightClock.__doc__ is not None
    rows = [
        list(map(int, line.split()))
        for line in re.findall(r"^ +\d[\d ]+$", WeightClock.__doc__, re.MULTILINE)
    ]
    assert len(rows) == 6
    clock = WeightClock(interval=2)
    for row in rows:
        clock.learn(row[0], row[column], asked_since=True)
    assert clock.after_each == (script == "train.py")
    for row in rows:
        rollout, (version, pushes, updates, staleness) = row[0], row[column : column + 4]
        assert (version - 1, clock.updates_in(version)) == (pushes, updates)
        assert clock.staleness(version, rollout) == staleness


def test_flags_that_slime_ignores_do_not_move_the_clock(tmp_path: Path) -> None:
    """`--num-critic-only-steps` without a critic, and `--update-weights-interval` with
    `--release-train`."""
    ignored = {
        "num_critic_only_steps": 5,
        "use_critic": False,
        "update_weights_interval": 3,
        "release_train": True,
    }
    clock = EpisodeSource(rollout_args(tmp_path, **ignored)).clock
    assert (clock.frozen, clock.interval) == (0, 1)


def test_every_batch_has_the_same_names_even_if_nothing_happened() -> None:
    eventful = batch_metrics(
        [segment(stop, 1) for stop in StopReason], Counter(dict.fromkeys(FAULTS, 1)), IDLE, []
    )
    quiet = batch_metrics([segment("terminated", 1)], Counter(), IDLE, [])
    assert set(quiet) == set(eventful)
    assert all(type(value) is float for value in quiet.values())
