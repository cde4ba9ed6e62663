"""Builds the trees that tests run in: the agent's, the reference solution's and the unsolved one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from envs.errors import ConfigError
from envs.swe.instances import Instance
from envs.swe.sandbox.folders import process_folder, remove_tree
from envs.swe.verdict.changes import apply_changes, collect_changes, is_protected
from envs.swe.verdict.runs import build_tree

Build = Callable[[Path], None]


def counted_changes(tree: Path, pristine: Path, instance: Instance) -> Build:
    """A function that builds the judged tree: the pristine files, the tests' patch, and what counts of the changes.

    Raises:
        TooMuchChanged: the changes are more than any patch would be.
    """
    changes = collect_changes(tree, pristine)
    counted = {path: change for path, change in changes.items() if not is_protected(path, instance)}

    def build(target: Path) -> None:
        build_tree(target, pristine, instance.test_patch)
        apply_changes(target, counted)

    return build


def reference_tree(instance: Instance, pristine: Path) -> Build:
    """The judged tree of the reference solution, made as an agent's would be.

    Raises:
        ConfigError: there is no reference solution, or it does not apply.
    """
    with scratch_tree() as tree:
        build_reference(tree, pristine, instance)
        return counted_changes(tree, pristine, instance)


def build_reference(tree: Path, pristine: Path, instance: Instance) -> None:
    """Make the tree that an agent with the reference solution would leave behind.

    Raises:
        ConfigError: as `reference_tree`.
    """
    if not instance.patch.strip():
        raise ConfigError(f"{instance.instance_id}: it has no reference patch, so its tests cannot be validated")
    remove_tree(tree)
    try:
        build_tree(tree, pristine, instance.patch)
    except ConfigError as error:
        raise ConfigError(f"{instance.instance_id}: the reference patch does not apply: {error}") from error


@contextlib.contextmanager
def scratch_tree() -> Iterator[Path]:
    """A place for a tree, which is removed afterwards."""
    folder = process_folder().make()
    try:
        yield folder / "tree"
    finally:
        remove_tree(folder)
