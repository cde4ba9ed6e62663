"""Old checkpoints are deleted only if newer ones are complete for the actor, the critic and the
rollout."""

import itertools
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.bridge.checkpoints import rotate_checkpoints
from rollout.checkpoint import checkpoint_path, load_state
from rollout.errors import CheckpointError
from scripts.launcher.resume import common_step


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    roles = tmp_path / "roles.yaml"
    critic = {"role": "critic", "overrides": {"save": str(tmp_path / "critic")}}
    roles.write_text(yaml.safe_dump({"megatron": [critic]}))
    return Namespace(
        save=str(tmp_path / "actor"),
        advantage_estimator="ppo",
        megatron_config_path=str(roles),
        num_critic_only_steps=0,
    )


def write(
    args: Namespace, step: int, *roles: str, tracked: bool = True, state: bool = True
) -> None:
    """What a save at `step` leaves on disk for these roles."""
    for role in roles:
        folder = Path(args.save).with_name(role)
        (folder / f"iter_{step:07d}").mkdir(parents=True)
        (folder / f"iter_{step:07d}" / "weights.distcp").write_text("w")
        if tracked:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    if state:
        path = checkpoint_path(args.save, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("s")


def rotate(args: Namespace, step: int, keep: int) -> None:
    rotate_checkpoints(args, step, keep, checkpoint_path(args.save, step).parent)


def kept(args: Namespace, role: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(args.save).with_name(role).glob("iter_*"))


def states(args: Namespace) -> list[int]:
    return sorted(
        int(path.stem.rsplit("_", 1)[1]) for path in (Path(args.save) / "rollout").glob("*.pt")
    )


def test_both_roles_and_the_rollout_keep_their_last_common_steps(args: Namespace) -> None:
    for step in (19, 39, 59, 79):
        write(args, step, "actor", "critic")
        rotate(args, step, 2)
    assert kept(args, "actor") == kept(args, "critic") == states(args) == [59, 79]
    assert not list(Path(args.save).rglob(".deleting-*"))


def test_a_step_that_one_role_lacks_does_not_count(args: Namespace) -> None:
    write(args, 19, "actor", "critic")
    write(args, 39, "actor", "critic")
    write(args, 59, "actor", state=False)
    rotate(args, 59, 2)
    assert kept(args, "actor") == [19, 39, 59] and kept(args, "critic") == [19, 39]
    rotate(args, 59, 1)
    assert kept(args, "actor") == [39, 59] and kept(args, "critic") == [39]


def test_a_checkpoint_that_is_still_being_written_does_not_count(args: Namespace) -> None:
    for step in (19, 39):
        write(args, step, "actor", "critic")
    write(args, 59, "actor", "critic", tracked=False)
    rotate(args, 59, 2)
    assert kept(args, "actor") == kept(args, "critic") == [19, 39, 59]


def test_while_only_the_critic_trains_it_is_rotated_alone(args: Namespace) -> None:
    args.num_critic_only_steps = 70
    for step in (19, 39, 59):
        write(args, step, "critic")
        rotate(args, step, 2)
    assert kept(args, "critic") == [39, 59]
    write(args, 79, "actor", "critic")
    rotate(args, 79, 2)
    assert kept(args, "critic") == [39, 59, 79], "the actor has one step, so nothing may go yet"
    write(args, 99, "actor", "critic")
    rotate(args, 99, 2)
    assert kept(args, "critic") == kept(args, "actor") == [79, 99]


def test_without_a_critic_only_the_actor_counts(args: Namespace) -> None:
    args.advantage_estimator = "grpo"
    for step in (9, 19, 29):
        write(args, step, "actor")
        rotate(args, step, 1)
    assert kept(args, "actor") == states(args) == [29]


def test_half_deleted_checkpoints_are_deleted_and_links_are_left_alone(
    args: Namespace, tmp_path: Path
) -> None:
    actor = Path(args.save)
    (tmp_path / "elsewhere").mkdir()
    for step in (9, 19):
        (actor / f".deleting-iter_{step:07d}" / "part").mkdir(parents=True)
    (actor / "iter_0000003").symlink_to(tmp_path / "elsewhere")
    for step in (19, 39):
        write(args, step, "actor", "critic")
    rotate(args, 39, 1)
    assert sorted(path.name for path in actor.glob("*iter_*")) == ["iter_0000003", "iter_0000039"]


def resumes_at(args: Namespace) -> int:
    """The step from which the scripts would continue; -1 for the beginning."""
    return common_step(Path(args.save), Path(args.save).with_name("critic"), critic_only=0)


MOMENTS = 10
"""A rotation of one step renames and deletes two folders, of two files each, and the rollout's
state."""


@pytest.mark.parametrize("moment", range(MOMENTS + 1))
def test_a_rotation_that_is_killed_at_any_moment_leaves_nothing_half_deleted_that_could_be_used(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    for step in (19, 39):
        write(args, step, "actor", "critic")
        for role in ("actor", "critic"):
            (Path(args.save).with_name(role) / f"iter_{step:07d}" / "common.pt").write_text("c")
    count = itertools.count()

    def mortal(act: Callable[..., Any]) -> Callable[..., Any]:
        def step(*words: Any, **more: Any) -> Any:
            if next(count) == moment:
                raise KeyboardInterrupt
            return act(*words, **more)

        return step

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "rename"), (os, "unlink"), (os, "rmdir")):
            patch.setattr(owner, name, mortal(getattr(owner, name)))
        try:
            rotate(args, 39, 1)
        except KeyboardInterrupt:
            assert moment < MOMENTS
        else:
            assert moment == next(count) == MOMENTS
    assert resumes_at(args) == 39
    checkpoint_path(args.save, 39).unlink()  # a reason to go back to the step before
    for role in ("actor", "critic"):
        for folder in Path(args.save).with_name(role).glob("iter_*"):
            assert len(list(folder.iterdir())) == 2, folder
    assert resumes_at(args) == (
        19 if kept(args, "actor") == kept(args, "critic") == [19, 39] else -1
    )
    if 19 not in states(args):
        with pytest.raises(CheckpointError, match="does not exist"):
            load_state(args.save, None, 19)


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (19, 39):
        write(args, step, "actor", "critic")

    def refuse(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with caplog.at_level(logging.WARNING):
        rotate(args, 39, 1)
    assert "read-only file system" in caplog.text and kept(args, "actor") == [19, 39]
