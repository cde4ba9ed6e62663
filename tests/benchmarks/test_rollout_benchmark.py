"""The rollout benchmark: the simulated engine is like SGLang, every loop runs against it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.simulated_sglang import Engine, PrefixCache, Request, Timing, saturated
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.checkouts import slime_checkouts
from tests.fixtures.warm_python import run_python

ROOT = Path(__file__).parents[2]
TIMING = Timing(places=2, step_s=1.0, cached_token_s=0.0, prefill_s=0.5, prefill_token_s=0.0)


def prompt(seed: int, tokens: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, tokens, dtype=np.int32)


def started(*lengths: int) -> tuple[Engine, list[Request]]:
    engine = Engine(TIMING)
    requests = [Request(prompt(k), length) for k, length in enumerate(lengths)]
    for request in requests:
        engine.submit(request, 0.0)
    return engine, requests


def finish(engine: Engine, requests: list[Request]) -> list[tuple[int, float]]:
    """Run the engine until it is empty; which request finished when."""
    found = []
    while engine.load:
        now = engine.next_event
        found += [(requests.index(request), now) for request in engine.advance()]
    return found


def test_places_limit_what_runs_at_once_and_waiting_requests_are_prefilled_first() -> None:
    engine, requests = started(3, 5, 2)
    # A prefill of 0.5 s gives the first token. The second prefill delays the request that is still
    # running.
    assert finish(engine, requests) == [(0, 3.0), (2, 3.0 + 0.5 + 1.0), (1, 5.5)]
    assert engine.tokens == 10


def test_an_abort_stops_everything_at_the_last_finished_step() -> None:
    engine, requests = started(10)
    engine.advance()
    engine.paused = True
    assert engine.abort(0.5 + 3.2) == requests and requests[0].done == 1 + 3 and engine.load == 0
    after = [Request(prompt(2), 1)]
    engine.submit(after[0], 4.0)
    assert engine.next_event == float("inf"), "nothing starts while the weights are loaded"
    engine.resume(9.0)
    assert finish(engine, after) == [(0, 9.5)]


def test_a_retracted_request_goes_on_after_its_prompt_and_answer_are_prefilled_again() -> None:
    engine, requests = started(10, 10, 10)
    engine.advance()
    engine.advance()
    engine.paused = True
    assert engine.retract(1.0 + 3.2) == requests[:2] and [r.done for r in requests] == [4, 4, 0]
    engine.resume(9.0)
    # The prefill gives the fifth token, five steps the others; then the third request has a place.
    assert finish(engine, requests) == [(0, 14.5), (1, 14.5), (2, 24.0)]


def test_the_prefix_cache_counts_whole_blocks_from_the_beginning_and_forgets_the_oldest() -> None:
    cache = PrefixCache(tokens=64)
    first = prompt(1)
    assert cache.take(first) == 0
    assert cache.take(np.concatenate([first[:40], prompt(2, 24)])) == 32
    cache.take(prompt(3))
    assert cache.take(first) == 0


def test_a_saturated_engine_is_the_fastest_way_through_the_same_requests() -> None:
    work = [(prompt(k), 5 + k % 7) for k in range(40)]
    tokens, answers = saturated(TIMING, work)
    updated, _ = saturated(TIMING, work, every=5)
    assert 0 < answers < updated < tokens < TIMING.places / TIMING.prefill_s


RUN = """
import json, sys
from pathlib import Path
from benchmarks.loops import Case, run_case
for loop in sys.argv[2].split():
    print(json.dumps(run_case(Case(loop, 16, processes=int(sys.argv[3]), places=4, batches=1), Path(sys.argv[1]))))
"""


def run(folder: Path, *loops: str, processes: int = 1) -> list[dict[str, Any]]:
    chatml_tokenizer().save_pretrained(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["-c", RUN, str(folder), " ".join(loops), str(processes)]
    if loops[0].startswith("slime"):
        parts = (ROOT / "tests/slime/cpu/imports", slime_checkouts()[0], ROOT)
        environment["PYTHONPATH"] = ":".join(map(str, parts))
        environment["SLIME_CPU_WORK"] = str(folder)
        command = [os.environ["SLIME_CPU_PYTHON"], *words]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    else:
        done = run_python(words, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


OURS = ("lock-step", "fixed", "per-env", "continuous", "continue", "continuous-async")


@pytest.mark.slow
@pytest.mark.parametrize("loops", [("fixed", "continue"), OURS])
def test_every_loop_of_ours_plays_its_batches(tmp_path: Path, loops: tuple[str, ...]) -> None:
    rows = run(tmp_path, *loops)
    assert [row["loop"] for row in rows] == list(loops)
    for row in rows:
        assert row["played_turns"] == 16
        assert 0 < row["share_of_saturated"] < 1.5
        assert sum(row["staleness"].values()) == pytest.approx(1.0)
    assert rows[loops.index("fixed")]["staleness"] == {"0": 1.0}


@pytest.mark.slow
def test_players_in_other_processes_are_charged_for_what_they_compute(tmp_path: Path) -> None:
    (row,) = run(tmp_path, "fixed", processes=2)
    assert (
        row["played_turns"] == 16 and row["players_cpu_ms_per_turn"] > 0 < row["share_of_saturated"]
    )


def test_slimes_own_loop_plays_whole_episodes(tmp_path: Path) -> None:
    if not slime_checkouts() or not os.environ.get("SLIME_CPU_PYTHON"):
        pytest.skip("set SLIME_PATH and SLIME_CPU_PYTHON as tests/slime/cpu/install.sh says")
    (row,) = run(tmp_path, "slime-partial")
    assert row["played_turns"] >= 2
