"""Every way in which a kill can leave the parts of a run, and what it resumes from."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from scripts.launcher.resume import Start, checkpoints
from tests.scripts.conftest import by_flag


@dataclass(frozen=True)
class Saved:
    """The steps that each part of a run has on disk; every folder's tracker names its last step."""

    actor: tuple[int, ...] = ()
    critic: tuple[int, ...] = ()
    state: tuple[int, ...] = ()

    def write(self, run: Path) -> None:
        for role in ("actor", "critic"):
            for step in getattr(self, role):
                (run / role / f"iter_{step:07d}").mkdir(parents=True)
                (run / role / "latest_checkpointed_iteration.txt").write_text(str(step))
        for step in self.state:
            path = run / "actor" / "rollout" / f"slime_verlog_{step}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")


@dataclass(frozen=True)
class Loaded:
    """What the printed job loads: the step of each role (None: the weights of a new run) and the
    first rollout."""

    actor: int | None
    critic: int | None
    first: int | None
    """None: slime finds it in the critic's checkpoint."""


def step_of(folder: str) -> int | None:
    """The step that Megatron loads from this folder; it must be there."""
    if folder.endswith("_torch_dist"):
        return None
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        assert Path(folder).name == "actor", (
            "slime takes a missing folder for a new run, of the actor alone"
        )
        return None
    step = int(tracker.read_text())
    assert (Path(folder) / f"iter_{step:07d}").is_dir(), f"{folder} has no step {step}"
    return step


def loaded(words: list[str], roles: str) -> Loaded:
    flags = by_flag(words)
    assert "--ckpt-step" not in flags
    critic = yaml.safe_load(roles)["megatron"][0]["overrides"]
    found = Loaded(
        step_of(flags["--load"][0]),
        step_of(critic["load"]),
        int(flags["--start-rollout-id"][0]) if "--start-rollout-id" in flags else None,
    )
    fresh = [name in flags for name in ("--finetune", "--no-load-optim", "--no-load-rng")]
    assert fresh == [found.first is not None] * 3
    restored = [critic.get(name) for name in ("finetune", "no_load_optim", "no_load_rng")]
    assert restored == ([False] * 3 if found.first else [None] * 3)
    return found


def resume(run: Path, critic_only: int) -> Loaded:
    """What a run in this folder loads, whose reference and pretrained critic are somewhere else."""
    start = Start(
        run_dir=str(run),
        hf_checkpoint="/m",
        reference="/m_torch_dist",
        critic="/c_torch_dist",
        critic_only=critic_only,
        critic_lr="1e-5",
    )
    return loaded(*checkpoints(start))


START = Loaded(actor=None, critic=None, first=0)
NEW = Loaded(actor=None, critic=None, first=None)


def at(step: int) -> Loaded:
    return Loaded(actor=step, critic=step, first=None)


def warming(step: int) -> Loaded:
    """Only the critic has trained: the actor is the reference."""
    return Loaded(actor=None, critic=step, first=step + 1)


CASES = {
    "a new run": (45, Saved(), NEW, ""),
    "critic in the warm-up": (45, Saved(critic=(19,), state=(19,)), warming(19), ""),
    "critic at step 0": (45, Saved(critic=(0,), state=(0,)), warming(0), ""),
    "state of the next step": (45, Saved(critic=(19,), state=(19, 39)), warming(19), ""),
    "actor's first save, critic's not": (
        45,
        Saved(actor=(59,), critic=(19, 39), state=(19, 39, 59)),
        warming(39),
        "note: step 39 is the last that was saved completely (last of the actor: 59, of the "
        "critic: 39)",
    ),
    "both equal": (45, Saved(actor=(59,), critic=(39, 59), state=(39, 59)), at(59), ""),
    "actor further": (
        45,
        Saved(actor=(59, 79), critic=(39, 59), state=(59, 79)),
        at(59),
        "note: step 59 is the last",
    ),
    "critic further": (
        45,
        Saved(actor=(59,), critic=(59, 79), state=(59, 79)),
        at(59),
        "note: step 59 is the last",
    ),
    "last state missing": (
        45,
        Saved(actor=(59, 79), critic=(59, 79), state=(59,)),
        at(59),
        "note: step 59 is the last",
    ),
    "state missing": (
        45,
        Saved(critic=(19,)),
        START,
        "(last of the actor: none, of the critic: 19)",
    ),
    "actor only, step 0": (
        0,
        Saved(actor=(0,), state=(0,)),
        START,
        "(last of the actor: 0, of the critic: none)",
    ),
    "no step in common": (
        0,
        Saved(actor=(39,), critic=(19,), state=(19, 39)),
        START,
        "note: no step was saved completely",
    ),
    "back to step 0": (
        0,
        Saved(actor=(0, 1), critic=(0,), state=(0, 1)),
        at(0),
        "note: step 0 is the last",
    ),
}
"""How many steps train the critic alone, what is on disk, what is loaded, and what is said."""


@pytest.mark.parametrize("case", CASES)
def test_a_run_continues_from_the_last_step_that_all_parts_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    critic_only, saved, wanted, note = CASES[case]
    saved.write(tmp_path)
    assert resume(tmp_path, critic_only) == wanted
    printed = capsys.readouterr().err
    assert note in printed and bool(note) == bool(printed)


def test_a_checkpoint_that_was_not_written_to_its_end_does_not_count(tmp_path: Path) -> None:
    Saved(actor=(59,), critic=(59, 79), state=(59, 79)).write(tmp_path)
    (tmp_path / "actor" / "iter_0000079").mkdir()
    assert resume(tmp_path, 45) == at(59)
    assert resume(tmp_path, 45) == at(59), "the links of an earlier start are replaced"
