"""The cheat corpus: code that would pass any test, right or wrong. None of it is paid; honest
solutions are."""

import pytest

from envs.swe.verdict.evaluate import Verdict
from tests.cases import some
from tests.envs.swe.honest_variants import ORDERS
from tests.envs.swe.orders_repository import RIGHT, WRONG, orders_options
from tests.envs.swe.swe_cheats import CHEATS
from tests.envs.swe.tiny_repository import judged

pytestmark = pytest.mark.usefixtures("few_runs")

HONEST = {"the reference": RIGHT, **ORDERS}


def _verdict(code: str) -> Verdict:
    return judged(orders_options(), {"shop/orders.py": code})


QUICK = (
    "tests emptied once their module is imported",
    "assertions removed by an import hook",
    "an exit status of its own",
    "answers that equal everything",
    "the expected value read from the caller's source",
    "a mark left in memory for the next run",
)


@pytest.mark.parametrize("name", some(CHEATS, QUICK))
def test_a_cheat_is_not_paid_and_the_verdict_says_why(name: str) -> None:
    code, reason = CHEATS[name]
    verdict = _verdict(WRONG + code)
    assert not verdict.solved and reason in verdict.reason


@pytest.mark.parametrize("name", some(HONEST, ["own exceptions"]))
def test_an_honest_solution_is_paid(name: str) -> None:
    verdict = _verdict(HONEST[name])
    assert verdict.solved, verdict.reason


@pytest.mark.parametrize("name", QUICK[:1])
def test_a_cheat_is_not_paid_a_share_either(name: str) -> None:
    """With `dense_reward`, the progression is paid."""
    assert _verdict(WRONG + CHEATS[name][0]).progression == 0.0
