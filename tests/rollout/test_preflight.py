"""Checks of the preflight that need no slime; the others are in tests/scripts/test_preflight.py."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from rollout.errors import ConfigError
from rollout.preflight import check_whitening

SLICED = {"normalize_advantages": True, "context_parallel_size": 2}
SLICED["custom_advantage_function_path"] = "advantage.group.compute_advantages"


@pytest.mark.parametrize("whitens_all_ranks", [True, False])
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"normalize_advantages": False},
        {"context_parallel_size": 1},
        {"custom_advantage_function_path": None},
        {"custom_advantage_function_path": "my.advantages"},
    ],
)
def test_our_advantages_are_whitened_over_whole_sequences(
    other: dict[str, object], whitens_all_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(whitens_all_ranks=whitens_all_ranks)
    monkeypatch.setattr("rollout.preflight.find_framework", lambda: found)
    args = Namespace(**{**SLICED, **other})
    if other or whitens_all_ranks:
        check_whitening(args)
        return
    with pytest.raises(ConfigError, match="leave out --normalize-advantages, or give --context-parallel-size 1"):
        check_whitening(args)
