"""The commands' tests play in environment workers that are forked: none of them is about a worker's start."""

import pytest


@pytest.fixture(autouse=True)
def _warm_workers(warm_env_workers: None) -> None:
    """See `warm_env_workers`."""
