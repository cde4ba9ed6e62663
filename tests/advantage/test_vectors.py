"""docs/vectors, which other projects can run too, is what the plain definitions compute; other
tests compare ours."""

import json
from typing import Any

import pytest

from tests.advantage.vectors import FOLDER, vectors


def test_the_files_are_what_the_definitions_compute() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(vectors())
    for name, content in vectors().items():
        written = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert numbers(written) == pytest.approx(numbers(content), abs=1e-12), name


def numbers(content: Any) -> list[float]:
    """All numbers in a file, in order; those of other platforms differ in their last digit."""
    if isinstance(content, dict):
        return numbers(list(content.values()))
    if isinstance(content, list):
        return [number for part in content for number in numbers(part)]
    return [] if isinstance(content, str) else [float(content)]
