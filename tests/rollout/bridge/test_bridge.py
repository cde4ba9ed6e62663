"""Only the bridge and `rollout/samples.py` know the fields of slime's `Sample`."""

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.bridge.framework import Sample
from rollout.spec import EnvSpec, EpisodeSpec
from rollout.turn import Generation, Prompt, Segment, Turn

REPO = Path(__file__).parents[3]
FIELDS = {field.name for field in dataclasses.fields(Sample)}
RECORDS = (EnvSpec, EpisodeSpec, Generation, Prompt, Segment, Turn)
SHARED = {field.name for record in RECORDS for field in dataclasses.fields(record)} | {"status"}
"""Names that plain records, or an HTTP response, have as well."""
RENAMED = ("loss_mask", "response_length", "remove_sample", "train_metadata", "group_index", "non_generation_time")


def knows_fields(path: Path) -> bool:
    return "bridge" in path.parts or path.name == "samples.py"


def test_renaming_fields_of_the_sample_touches_the_bridge_and_samples_only(tmp_path: Path) -> None:
    without = shutil.ignore_patterns("__pycache__")
    for package in ("rollout", "envs", "advantage", "tests/fixtures"):
        shutil.copytree(REPO / package, tmp_path / package, ignore=without)
    shutil.copy(REPO / "slime_verlog.py", tmp_path)
    (tmp_path / "tests" / "__init__.py").touch()
    for path in filter(knows_fields, (tmp_path / "rollout").rglob("*.py")):
        path.write_text(re.sub(rf"\b({'|'.join(RENAMED)})\b", r"renamed_\1", path.read_text()))
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.every_rollout", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert not set(RENAMED) & set(names) and {f"renamed_{name}" for name in RENAMED} <= set(names)


def fields_read(path: Path) -> Iterator[str]:
    """Places in the file that read or write a field of a sample, or make a sample from its fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in FIELDS:
            holder = ast.unparse(node.value)
            unmistakable = node.attr not in SHARED and path.is_relative_to(REPO / "rollout")
            if unmistakable or re.search(r"\b(samples?|group)\b", holder):
                yield f"{path.relative_to(REPO)}:{node.lineno}: {holder}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Sample":
            yield f"{path.relative_to(REPO)}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", ["rollout", "inspection", "embedded"])
def test_no_other_module_names_a_field_of_the_sample(package: str) -> None:
    paths = [path for path in (REPO / package).rglob("*.py") if not knows_fields(path.relative_to(REPO))]
    assert paths and [place for path in paths for place in fields_read(path)] == []
