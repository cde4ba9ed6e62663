"""The engine's process: new weights abort what is in flight, and the process never outlives its
trainer."""

import http.client
import json
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.engine.decoder import load_hf_model
from embedded.engine.engine import EngineOptions
from embedded.engine.process import EngineProcess
from embedded.train import train
from rollout.errors import ConfigError, EngineError
from tests.cases import some
from tests.embedded.test_train import maker
from tests.fixtures.warm_python import CONTEXT, warm_engines
from tests.rollout.workers.test_env_pool import is_alive


@pytest.fixture(autouse=True)
def _warm_engines() -> None:
    """Not here: most of these tests start the engine's process as a run does."""


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engines of a test keep their weights."""
    folder = tmp_path / "memory"
    folder.mkdir()
    multiprocessing.util.get_temp_dir()  # the sockets of forked processes stay where paths are short
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def running(policy_folder: Path) -> Iterator[EngineProcess]:
    options = EngineOptions(model_path=str(policy_folder), max_running_requests=4)
    with warm_engines(), EngineProcess(options) as engine:
        yield engine


def ask(engine: EngineProcess, tokens: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection(engine.host, engine.port, timeout=60)
    params = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 1}
    connection.request(
        "POST", "/generate", json.dumps({"input_ids": [5, 6, 7], "sampling_params": params})
    )
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def settings(folder: Path, policy: Path, **flags: Any) -> Any:
    keys = {"turn_quota": "global", "engine": {"max_retries": 1, "backoff_s": 0.01}}
    continuous = {"rollout_function_path": "rollout.continuous.generate_rollout"}
    return maker(policy, folder)(keys, **{**continuous, "num_rollout": 2, **flags})


class Tracker:
    """Calls a function after the first update, for example to break the run."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        if rollout_id == 0:
            self._act()

    def evaluation(self, rollout_id: int, result: Any, weights: Any) -> None:
        """Does nothing."""


def engines_of(parent: int) -> list[int]:
    """Process ids of the engines that this process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            ours = f"\nPPid:\t{parent}\n" in status.read_text()
            if ours and "engine.process" in (status.parent / "cmdline").read_text():
                found.append(int(status.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def test_new_weights_abort_the_answers_in_flight(
    running: EngineProcess, policy_folder: Path
) -> None:
    weights = load_hf_model(policy_folder).state_dict()
    before, long = ask(running, 8), {}
    thread = threading.Thread(target=lambda: long.update(ask(running, 240)))
    thread.start()
    while not running._call("GET", "/v1/loads")[1]["loads"][0]["num_running_reqs"]:
        assert thread.is_alive()
    running.update_weights({name: weight * 1.5 for name, weight in weights.items()}, "7")
    thread.join()
    after = ask(running, 8)
    assert long["meta_info"]["finish_reason"]["type"] == "abort" and len(long["output_ids"]) < 240
    assert (
        after["meta_info"]["weight_version"] == "7" and after["output_ids"] != before["output_ids"]
    )
    running.update_weights(weights, "8")
    assert ask(running, 8)["output_ids"] == before["output_ids"]


def test_a_model_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    with (
        warm_engines(),
        pytest.raises(ConfigError, match="is not a model folder"),
        EngineProcess(EngineOptions(model_path=str(tmp_path))) as engine,
    ):
        engine.port  # noqa: B018


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds the engine in /proc")
def test_an_engine_that_is_killed_ends_the_run_in_one_sentence(
    policy_folder: Path, tmp_path: Path, memory: Path
) -> None:
    def kill() -> None:
        (engine,) = engines_of(os.getpid())
        os.kill(engine, signal.SIGKILL)

    with pytest.raises(
        EngineError, match="^the engine's process ended by signal SIGKILL"
    ) as caught:
        train(settings(tmp_path, policy_folder, num_rollout=4), Tracker(kill))
    assert "\n" not in str(caught.value)
    assert not engines_of(os.getpid()) and not list(memory.iterdir())


def train_and_wait(folder: Path, policy: Path, trains: bool) -> None:
    """A run that says that its engine has new weights, and then waits to be ended."""

    def wait() -> None:
        (folder / "served").touch()
        time.sleep(600)

    tempfile.tempdir = str(folder / "memory")
    if trains:
        train(settings(folder, policy), Tracker(wait))
    else:
        with EngineProcess(EngineOptions(model_path=str(policy))) as engine:
            engine.update_weights(load_hf_model(policy).state_dict(), "1")
            wait()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds the engine in /proc")
# What SIGKILL does not prevent, SIGTERM does not either.
@pytest.mark.parametrize(
    "how",
    some([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]),
    ids=lambda how: how.name,
)
def test_the_engine_ends_with_its_trainer(
    how: signal.Signals, policy_folder: Path, tmp_path: Path, memory: Path
) -> None:
    # Only Ctrl-C lets the trainer clean up, so only there it matters what the trainer was doing.
    run = CONTEXT.Process(
        target=train_and_wait, args=(tmp_path, policy_folder, how is signal.SIGINT)
    )
    run.start()
    while not (tmp_path / "served").exists():
        assert run.is_alive()
        time.sleep(0.02)
    assert run.pid is not None
    (engine,) = engines_of(run.pid)
    os.kill(run.pid, how)
    run.join(60)
    assert run.exitcode
    deadline = time.monotonic() + 30
    while is_alive(engine) or list(memory.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
