"""Every way in which a kill can leave the parts of a run, and what the script resumes from."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.scripts.conftest import Command, Fresh, by_flag, train_flags


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
            path = run / "actor" / "rollout" / f"slime_verlog_{step}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")


@dataclass(frozen=True)
class Loaded:
    """What the printed job loads: the step of each role (None: the weights of a new run) and the first rollout."""

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
        assert Path(folder).name == "actor", "slime takes a missing folder for a new run, of the actor alone"
        return None
    step = int(tracker.read_text())
    assert (Path(folder) / f"iter_{step:07d}").is_dir(), f"{folder} has no step {step}"
    return step


def loaded(words: list[str]) -> Loaded:
    flags = by_flag(train_flags(words))
    assert "--ckpt-step" not in flags
    critic = yaml.safe_load(Path(flags["--megatron-config-path"][0]).read_text())["megatron"][0]["overrides"]
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


START = Loaded(actor=None, critic=None, first=0)
NEW = Loaded(actor=None, critic=None, first=None)


def at(step: int) -> Loaded:
    return Loaded(actor=step, critic=step, first=None)


def warming(step: int) -> Loaded:
    """Only the critic has trained: the actor is the reference."""
    return Loaded(actor=None, critic=step, first=step + 1)


# run_babyai.sh trains the critic alone in steps 0 to 44.
WITH_WARMUP = {
    "a new run": (Saved(), NEW, ""),
    "the rollout's state before the first models": (Saved(state=(19,)), NEW, ""),
    "critic in the warm-up": (Saved(critic=(19,), state=(19,)), warming(19), ""),
    "critic at step 0": (Saved(critic=(0,), state=(0,)), warming(0), ""),
    "state of the next step": (Saved(critic=(19,), state=(19, 39)), warming(19), ""),
    "actor's first save, critic's not": (
        Saved(actor=(59,), critic=(19, 39), state=(19, 39, 59)),
        warming(39),
        "note: step 39 is the last that was saved completely (last of the actor: 59, of the critic: 39)",
    ),
    "both equal": (Saved(actor=(59,), critic=(39, 59), state=(39, 59)), at(59), ""),
    "actor further": (
        Saved(actor=(59, 79), critic=(39, 59), state=(59, 79)),
        at(59),
        "note: step 59 is the last that was saved completely (last of the actor: 79, of the critic: 59)",
    ),
    "critic further": (Saved(actor=(59,), critic=(59, 79), state=(59, 79)), at(59), "note: step 59 is the last"),
    "state of the last step missing": (
        Saved(actor=(59, 79), critic=(59, 79), state=(59,)),
        at(59),
        "note: step 59 is the last",
    ),
    "state missing": (
        Saved(actor=(59,), critic=(59,)),
        START,
        "note: no step was saved completely (last of the actor: 59, of the critic: 59), so the run starts from the",
    ),
    "state missing in the warm-up": (Saved(critic=(19,)), START, "(last of the actor: none, of the critic: 19)"),
}

WITHOUT_WARMUP = {
    "a new run": (Saved(), NEW, ""),
    "actor only": (
        Saved(actor=(19,), state=(19,)),
        START,
        "note: no step was saved completely (last of the actor: 19, of the critic: none), so the run starts from the",
    ),
    "actor only, step 0": (Saved(actor=(0,), state=(0,)), START, "(last of the actor: 0, of the critic: none)"),
    "critic only": (
        Saved(critic=(19,), state=(19,)),
        START,
        "note: no step was saved completely (last of the actor: none, of the critic: 19)",
    ),
    "no step in common": (Saved(actor=(39,), critic=(19,), state=(19, 39)), START, "note: no step was saved"),
    "both at step 0": (Saved(actor=(0,), critic=(0,), state=(0,)), at(0), ""),
    "back to step 0": (Saved(actor=(0, 1), critic=(0,), state=(0, 1)), at(0), "note: step 0 is the last"),
    "both equal": (Saved(actor=(19, 39), critic=(19, 39), state=(19, 39)), at(39), ""),
    "both different": (Saved(actor=(19, 39), critic=(19,), state=(19, 39)), at(19), "note: step 19 is the last"),
    "state missing": (Saved(actor=(19,), critic=(19,)), START, "note: no step was saved completely"),
}


def resume(fresh: Fresh, case: tuple[Saved, Loaded, str], **environment: str) -> None:
    saved, wanted, note = case
    saved.write(fresh.output / "babyai-Qwen2.5-3B-Instruct")
    done = fresh.run("run_babyai.sh", "--dry-run", **environment)
    assert loaded(fresh.words(done)) == wanted
    notes = [line for line in done.stderr.splitlines() if "saved completely" in line]
    assert len(notes) == bool(note) and all(note in line for line in notes), done.stderr


@pytest.mark.parametrize("case", WITH_WARMUP)
def test_a_run_with_warm_up_continues_from_the_last_step_that_all_parts_have(fresh: Fresh, case: str) -> None:
    resume(fresh, WITH_WARMUP[case])


@pytest.mark.parametrize("case", WITHOUT_WARMUP)
def test_a_run_without_warm_up_continues_from_the_last_step_that_all_parts_have(fresh: Fresh, case: str) -> None:
    """A pretrained critic replaces the warm-up; only a new run starts from it."""
    pretrained = fresh.home / "critic_torch_dist"
    resume(fresh, WITHOUT_WARMUP[case], PRETRAINED_CRITIC=str(pretrained))


def test_a_checkpoint_that_was_not_written_to_its_end_does_not_count(fresh: Fresh) -> None:
    run = fresh.output / "babyai-Qwen2.5-3B-Instruct"
    Saved(actor=(59,), critic=(59, 79), state=(59, 79)).write(run)
    (run / "actor" / "iter_0000079").mkdir()
    assert loaded(fresh.words(fresh.run("run_babyai.sh", "--dry-run"))) == at(59)


def test_sao_trains_its_critic_alone_in_the_first_ten_steps(command: Command, tmp_path: Path) -> None:
    Saved(critic=(9,), state=(9,)).write(tmp_path / "out" / "sao-Qwen2.5-7B-Instruct")
    assert loaded(command("run_sao.sh")) == warming(9)
    Saved(critic=(10,), state=(10,)).write(tmp_path / "out" / "sao-Qwen2.5-7B-Instruct")
    assert loaded(command("run_sao.sh")) == warming(9), "the actor trains in step 10, and was not saved"
