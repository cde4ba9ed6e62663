"""Killed and started again: the run goes on with the same episodes, turns and weights as if nothing
had happened."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded.engine.server import EngineServer
from scripts.launcher.resume import Start, checkpoints
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import Run, stop_all

pytestmark = pytest.mark.slow

WARMUP = {"w_epoch": 1, "w_iter": 1, "fraction": 0.5}
ROLLOUTS = 4


def checkpoint_flags(run: Run, critic_lr: str, critic: Path | None = None) -> list[str]:
    """What `scripts/launch.py` gives train.py to start or resume the experiment in `run.work`."""
    start = Start(
        run_dir=str(run.work),
        hf_checkpoint=str(run.model),
        reference=str(run.reference),
        critic=str(critic or run.reference),
        critic_only=critic_only_steps(run),
        critic_lr=critic_lr,
    )
    flags, roles = checkpoints(start)
    (run.work / "roles.yaml").write_text(roles)
    return flags


def script_arguments(run: Run) -> list[str]:
    return [*checkpoint_flags(run, "5.0e-3"), "--save-interval 1"]


def critic_only_steps(run: Run) -> int:
    found = re.search(r"--num-critic-only-steps (\d+)", " ".join(run.flags))
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def runs(make_run: Callable[..., Run], engine: EngineServer) -> Iterator[tuple[Run, Run]]:
    """The same experiment twice: straight through, and killed in the warm-up, within a save, and in
    PPO.

    `per_env`, because with a global quota the engine's speed decides which slot plays the batch's
    last turns.
    """
    flags = (
        *engine_flags(engine),
        f"--num-rollout {ROLLOUTS} --num-critic-only-steps 2 --normalize-advantages",
        "--sglang-enable-deterministic-inference",
    )
    settings = {"critic_warmup": WARMUP, "turn_quota": "per_env"}
    straight = make_run("straight", *flags, **settings)
    straight.train(script_arguments(straight))
    killed = make_run("killed", *flags, **settings)
    for last, lost in ((0, None), (2, 2), (2, None)):
        process = killed.start(script_arguments(killed))
        wait_for(killed, process, partial(complete, killed, last))
        stop_all(killed.work)
        process.wait(60)
        if lost is not None:
            lose_critic(killed, lost)
    killed.train(script_arguments(killed))
    yield straight, killed


def lose_critic(run: Run, step: int) -> None:
    """As if the run had been killed after the actor's save of this step, before the critic's."""
    critic = run.work / "critic"
    shutil.rmtree(critic / f"iter_{step:07d}")
    if (critic / f"iter_{step - 1:07d}").exists():
        (critic / "latest_checkpointed_iteration.txt").write_text(str(step - 1))
    else:
        shutil.rmtree(critic)


def complete(run: Run, step: int) -> bool:
    """Whether models and rollout state of this step are on the disk; in the warm-up, only the
    critic's model is."""
    roles = ("critic",) if step < WARMUP["w_epoch"] + WARMUP["w_iter"] else ("actor", "critic")
    return state_of(run, step).exists() and all(saved_step(run, role) >= step for role in roles)


def saved_step(run: Run, role: str) -> int:
    """The newest step of a role on the disk; -1 if there is none."""
    path = run.work / role / "latest_checkpointed_iteration.txt"
    return int(path.read_text() or -1) if path.exists() else -1


def state_of(run: Run, step: int) -> Path:
    return run.work / "actor" / "rollout" / f"slime_verlog_{step}.pt"


def wait_for(run: Run, process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, f"the run ended too early:\n{run.tail()}"
        assert time.monotonic() < deadline, f"the awaited files did not come:\n{run.tail()}"
        time.sleep(0.05)


@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_the_same_turns_are_played_as_without_the_kill(runs: tuple[Run, Run], rollout: int) -> None:
    straight, killed = (run.samples(rollout) for run in runs)
    assert [story(s) for s in killed] == [story(s) for s in straight]


def story(sample: dict[str, Any]) -> tuple[Any, ...]:
    facts = sample["metadata"]
    group = sample.get("rollout_id", sample.get("group_id"))
    return (
        facts["episode_id"],
        facts["round_number"],
        facts["kind"],
        group,
        sample["tokens"],
        sample["reward"],
    )


@pytest.mark.parametrize("rollout", range(1, ROLLOUTS))
def test_the_critic_goes_on_with_the_same_weights_and_targets(
    runs: tuple[Run, Run], rollout: int
) -> None:
    straight, killed = (run.records("critic", rollout)[0]["data"] for run in runs)
    for name in ("values", "returns", "advantages"):
        torch.testing.assert_close(
            torch.cat(killed[name]), torch.cat(straight[name]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("rollout", (2, 3))
def test_the_actor_goes_on_with_the_same_weights(runs: tuple[Run, Run], rollout: int) -> None:
    straight, killed = (run.records("actor", rollout)[0]["data"] for run in runs)
    torch.testing.assert_close(
        torch.cat(killed["log_probs"]), torch.cat(straight["log_probs"]), rtol=1e-4, atol=1e-4
    )


def test_no_episode_was_lost_at_either_resume(runs: tuple[Run, Run]) -> None:
    lost = runs[1].logged("rollout/faults/episodes_lost_at_resume")
    assert len(lost) >= ROLLOUTS - WARMUP["w_iter"] and not any(lost)


def test_a_kill_within_the_very_first_save_starts_the_same_run_from_its_beginning(
    make_run: Callable[..., Run], engine: EngineServer
) -> None:
    """Without a warm-up: the actor has learned from the first batch, its critic is lost, so neither
    may go on."""
    flags = (*engine_flags(engine), "--sglang-enable-deterministic-inference --num-rollout 1")
    run = make_run("first", *flags, turn_quota="per_env")
    run.train(script_arguments(run))
    first = run.samples(0), run.records("actor", 0)[0]["data"]
    lose_critic(run, 0)
    arguments = script_arguments(run)
    assert arguments[arguments.index("--start-rollout-id") + 1] == "0"
    run.train(arguments)
    again = run.samples(0), run.records("actor", 0)[0]["data"]
    assert [story(s) for s in again[0]] == [story(s) for s in first[0]]
    torch.testing.assert_close(torch.cat(again[1]["log_probs"]), torch.cat(first[1]["log_probs"]))
    assert saved_step(run, "actor") == saved_step(run, "critic") == 0
