"""Finds the step from which a stopped run continues: the last that all its parts have saved."""

import sys
from dataclasses import dataclass
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in which Megatron names the step that it saved last, once it is complete."""


@dataclass(frozen=True)
class Start:
    """Where a run's files are, and what its roles load in a new run."""

    run_dir: str
    hf_checkpoint: str
    reference: str
    """The actor's checkpoint, and what KL measures."""
    critic: str
    """The critic's checkpoint."""
    critic_only: int
    """Steps at the beginning that train the critic alone. slime does not save the actor
    meanwhile."""
    critic_lr: str

    def folder(self, role: str) -> Path:
        """Return where a role saves."""
        return Path(self.run_dir, role)


def last_step(folder: Path) -> int:
    """Return the step that a role saved last, completely; -1 if there is none."""
    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.is_file() else -1


def step_name(step: int) -> str:
    """Return the name of Megatron's folder for a step."""
    return f"iter_{step:07d}"


def has_step(folder: Path, step: int) -> bool:
    """Whether a role has saved a step completely."""
    return step <= last_step(folder) and (folder / step_name(step)).is_dir()


def common_step(actor: Path, critic: Path, critic_only: int) -> int:
    """Return the last step that actor, critic and rollout state have all saved; -1 if there is
    none."""
    states = (actor / "rollout").glob("slime_verlog_*.pt")
    numbers = [path.stem.removeprefix("slime_verlog_") for path in states]
    steps = sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)
    for step in steps:
        needs_actor = step >= critic_only
        if has_step(critic, step) and (not needs_actor or has_step(actor, step)):
            return step
    return -1


def folder_at(folder: Path, step: int) -> Path:
    """Return a folder from which a role loads a step: its own, or, if that has a later step, a view
    of this one alone.

    `--ckpt-step` would not do: slime takes 0 for absent, and loads the reference at that step as
    well.
    """
    if last_step(folder) == step:
        return folder
    view = folder.parent / "resume" / folder.name
    link = view / step_name(step)
    view.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(Path("..", "..", folder.name, step_name(step)))
    (view / TRACKER).write_text(f"{step}\n")
    return view


def checkpoints(start: Start) -> tuple[list[str], str]:
    """Return the flags of the run's checkpoints and the text of roles.yaml, which gives the critic
    its own.

    Both name the last common step, or the weights that a new run starts from.
    """
    actor = start.folder("actor")
    critic = start.folder("critic")
    step = common_step(actor, critic, start.critic_only)
    saved = last_step(actor), last_step(critic)
    _note_lost_steps(step, *saved)
    actor_load = str(actor)
    critic_load = start.critic
    flags: list[str] = []
    overrides = ""
    if step >= 0:
        critic_load = str(folder_at(critic, step))
    if step >= start.critic_only:
        actor_load = str(folder_at(actor, step))
    elif max(saved) >= 0:
        # slime takes a run without an actor's checkpoint for a fresh one: it would drop the
        # critic's optimizer, and v0.3.1 begins at rollout 0 whatever it is told. So the actor's
        # load is the reference, as slime would set it.
        actor_load = start.reference
        flags = [
            "--start-rollout-id",
            str(step + 1),
            "--finetune",
            "--no-load-optim",
            "--no-load-rng",
        ]
        if step >= 0:
            overrides = ", finetune: false, no_load_optim: false, no_load_rng: false"
    overrides = f"lr: {start.critic_lr}, load: {_quoted(critic_load)}, save: {_quoted(str(critic))}{overrides}"
    roles = f"megatron:\n  - {{name: default, role: critic, overrides: {{{overrides}}}}}"
    common = [
        "--hf-checkpoint",
        start.hf_checkpoint,
        "--ref-load",
        start.reference,
        "--load",
        actor_load,
    ]
    common += [
        "--save",
        str(actor),
        "--save-interval",
        "20",
        "--megatron-config-path",
        f"{start.run_dir}/roles.yaml",
    ]
    return common + flags, roles


def retention(kept: int | str, interval: int) -> list[str]:
    """Return the flags that let Megatron delete a checkpoint of a run with one role once the next
    one is complete."""
    return [] if kept == "all" else ["--save-retain-interval", str(interval)]


def _note_lost_steps(step: int, actor: int, critic: int) -> None:
    """Print a sentence if a part of the run has to go back to an earlier step, or to the
    beginning."""
    if max(actor, critic) <= step:
        return
    last = [str(saved) if saved >= 0 else "none" for saved in (actor, critic)]
    saved = f"last of the actor: {last[0]}, of the critic: {last[1]}"
    if step < 0:
        print(
            f"note: no step was saved completely ({saved}), so the run starts from the beginning",
            file=sys.stderr,
        )
    else:
        sentence = f"step {step} is the last that was saved completely ({saved}), so the run continues after it"
        print(f"note: {sentence}", file=sys.stderr)


def _quoted(text: str) -> str:
    """A text in YAML."""
    return "'" + text.replace("'", "''") + "'"
