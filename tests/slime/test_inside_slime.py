"""Programs that run inside every slime checkout that SLIME_PATH names: the patch, models, and the
data path."""

import pytest

from tests.fixtures.checkouts import CHECKOUTS, checks_of, failure_inside

PROGRAMS = (
    "tests.advantage.in_slime",
    "tests.advantage.in_slime_critic",
    "tests.advantage.image_critic",
    "tests.slime.data_path",
    "tests.slime.whole_episodes",
)
CHECKS = [(program, check) for program in PROGRAMS for check in checks_of(program)]


@pytest.mark.parametrize(("program", "check"), CHECKS)
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_it_holds(checkout: str, program: str, check: str) -> None:
    failure = failure_inside(checkout, program, check)
    assert failure is None, failure
