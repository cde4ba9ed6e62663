"""Turns and whole episodes in the data path of every slime checkout that SLIME_PATH names."""

import pytest

from tests.fixtures.checkouts import CHECKOUTS, checks_of, failure_inside

TURNS, WHOLE_EPISODES = "tests.slime.data_path", "tests.slime.whole_episodes"


@pytest.mark.parametrize("check", checks_of(TURNS))
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_turns_inside_slime(checkout: str, check: str) -> None:
    failure = failure_inside(checkout, TURNS, check)
    assert failure is None, failure


@pytest.mark.parametrize("check", checks_of(WHOLE_EPISODES))
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_whole_episodes_inside_slime(checkout: str, check: str) -> None:
    failure = failure_inside(checkout, WHOLE_EPISODES, check)
    assert failure is None, failure
