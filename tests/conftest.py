"""What all tests share: where the recordings are, and the skip sentence where they are not."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no failure: examples are bounded in number, not in wall time.
settings.register_profile("default-without-deadline", deadline=None)
settings.load_profile("default-without-deadline")

GOLDEN = Path(os.environ.get("SLIME_VERLOG_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))


def load_golden(name: str) -> Any:
    """Read one recording, or skip with the sentence that says how to enable the test."""
    path = GOLDEN / name
    if not path.exists():
        pytest.skip(f"recordings not found at {GOLDEN}; set SLIME_VERLOG_GOLDEN to the folder that holds {name}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


@pytest.fixture
def golden() -> Any:
    return load_golden
