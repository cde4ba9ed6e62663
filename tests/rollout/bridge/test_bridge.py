"""Only the bridge and `rollout/samples.py` know the fields of slime's `Sample`."""

import ast
import dataclasses
import re
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


def knows_fields(path: Path) -> bool:
    return "bridge" in path.parts or path.name == "samples.py"


def fields_read(path: Path) -> Iterator[str]:
    """Places in the file that read or write a field of a sample, or make a sample from its
    fields."""
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
    paths = [
        path for path in (REPO / package).rglob("*.py") if not knows_fields(path.relative_to(REPO))
    ]
    assert paths and [place for path in paths for place in fields_read(path)] == []
