"""The rollout benchmark: the simulated engine is like SGLang, every loop runs against it."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.simulated_sglang import Engine, PrefixCache, Request, Timing, saturated
from tests.fixtures.warm_python import run_python

TIMING = Timing(places=2, step_s=1.0, cached_token_s=0.0, prefill_s=0.5, prefill_token_s=0.0)


def prompt(seed: int, tokens: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, tokens, dtype=np.int32)


def finish(engine: Engine) -> list[tuple[float, Request]]:
    """Run the engine until it is empty; when each request finished."""
    found = []
    while engine.load:
        now = engine.next_event
        found += [(now, request) for request in engine.advance()]
    return found


def test_places_limit_what_runs_at_once_and_waiting_requests_are_prefilled_first() -> None:
    engine, requests = Engine(TIMING), [Request(prompt(k), length) for k, length in enumerate((3, 5, 2))]
    for request in requests:
        engine.submit(request, 0.0)
    done = finish(engine)
    # A prefill of 0.5 s gives the first token. The second prefill delays the request that is still running.
    order = [(requests.index(request), when) for when, request in done]
    assert order == [(0, 3.0), (2, 3.0 + 0.5 + 1.0), (1, 5.5)]
    assert engine.tokens == 10


def test_an_abort_stops_everything_at_the_last_finished_step() -> None:
    engine = Engine(TIMING)
    engine.submit(Request(prompt(1), 10), 0.0)
    engine.advance()
    engine.paused = True
    (stopped,) = engine.abort(0.5 + 3.2)
    assert stopped.done == 1 + 3 and engine.load == 0
    engine.submit(Request(prompt(2), 1), 4.0)
    assert engine.next_event == float("inf"), "nothing starts while the weights are loaded"
    engine.resume(9.0)
    assert [when for when, _ in finish(engine)] == [9.5]


def test_a_retracted_request_goes_on_after_its_prompt_and_answer_are_prefilled_again() -> None:
    engine, requests = Engine(TIMING), [Request(prompt(k), 10) for k in range(3)]
    for request in requests:
        engine.submit(request, 0.0)
    engine.advance()
    engine.advance()
    engine.paused = True
    assert engine.retract(1.0 + 3.2) == requests[:2] and [r.done for r in requests] == [4, 4, 0]
    engine.resume(9.0)
    # The prefill gives the fifth token, five steps the others; then the third request has a place.
    assert [(requests.index(request), when) for when, request in finish(engine)] == [(0, 14.5), (1, 14.5), (2, 24.0)]


def test_the_prefix_cache_counts_whole_blocks_from_the_beginning_and_forgets_the_oldest() -> None:
    cache, first = PrefixCache(tokens=64), prompt(1)
    assert cache.take(first) == 0
    assert cache.take(np.concatenate([first[:40], prompt(2, 24)])) == 32
    cache.take(prompt(3))
    assert cache.take(first) == 0


def test_a_saturated_engine_is_the_fastest_way_through_the_same_requests() -> None:
    work = [(prompt(k), 5 + k % 7) for k in range(40)]
    tokens, answers = saturated(TIMING, work)
    updated, _ = saturated(TIMING, work, every=5)
    assert 0 < answers < updated < tokens < TIMING.places / TIMING.prefill_s


def run(folder: Path, *loops: str, processes: int = 1) -> list[dict[str, Any]]:
    out = folder / "rollout.json"
    sizes = ("--turns", "16", "--places", "4", "--batches", "1", "--processes", str(processes), "--json", str(out))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_python(["-m", "benchmarks.rollout", "--loops", *loops, *sizes], env=environment)
    assert done.returncode == 0, done.stderr
    assert "of saturated" in done.stdout
    return json.loads(out.read_text())["rows"]


OURS = ("lock-step", "fixed", "per-env", "continuous", "continue", "continuous-async")


@pytest.mark.parametrize("loops", [("fixed", "continue"), pytest.param(OURS, marks=pytest.mark.slow)])
def test_every_loop_of_ours_plays_its_batches(tmp_path: Path, loops: tuple[str, ...]) -> None:
    rows = run(tmp_path, *loops)
    assert [row["loop"] for row in rows] == list(loops)
    for row in rows:
        assert row["played_turns"] == 16
        assert 0 < row["share_of_saturated"] < 1.5
        assert sum(row["staleness"].values()) == pytest.approx(1.0)
    assert rows[loops.index("fixed")]["staleness"] == {"0": 1.0}


def test_continuous_loops_are_not_measured_over_too_few_turns(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import rollout

    for batches, warm, advice in ((1, 2, "--batches 2"), (2, 0, "--warm 1")):
        sizes = ["--turns", "16384", "--engines", "64", "--batches", str(batches), "--warm", str(warm)]
        with pytest.raises(SystemExit):
            rollout.main(["--loops", "fixed", "continue", *sizes])
        assert f"give {advice} or more" in capsys.readouterr().err


@pytest.mark.slow
def test_players_in_other_processes_are_charged_for_what_they_compute(tmp_path: Path) -> None:
    (row,) = run(tmp_path, "fixed", processes=2)
    assert row["played_turns"] == 16 and row["players_cpu_ms_per_turn"] > 0 < row["share_of_saturated"]


def test_slimes_own_loop_plays_whole_episodes(tmp_path: Path) -> None:
    if not os.environ.get("SLIME_PATH") or not os.environ.get("SLIME_CPU_PYTHON"):
        pytest.skip("set SLIME_PATH and SLIME_CPU_PYTHON as tests/slime/cpu/install.sh says")
    (row,) = run(tmp_path, "slime-partial")
    assert row["played_turns"] >= 2
