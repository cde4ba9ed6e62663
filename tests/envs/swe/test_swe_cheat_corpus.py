"""The cheat corpus: code that would pass any test, right or wrong. None of it is paid; honest solutions are."""

import pytest

from tests.cases import some
from tests.envs.swe.honest_variants import ORDERS
from tests.envs.swe.orders_repository import RIGHT, WRONG, orders_env
from tests.envs.swe.swe_cheats import CHEATS
from tests.envs.swe.tiny_repository import call

HONEST = {"the reference": RIGHT, **ORDERS}


def _play(code: str, **options: object):
    env = orders_env(**options)
    assert "written" in env.step(call("create", path="shop/orders.py", text=code))[0]["obs_str"]
    return env, env.step("submit")[2]


QUICK = (
    "tests emptied once their module is imported",
    "assertions removed by an import hook",
    "failing tests marked as expected to fail",
    "an exit status of its own",
    "answers that equal everything",
    "the expected value read from the caller's source",
    "the judge's own hook replaced",
    "a mark left in memory for the next run",
)


@pytest.mark.parametrize("name", some(CHEATS, QUICK))
def test_a_cheat_is_not_paid_and_the_verdict_says_why(name: str) -> None:
    code, reason = CHEATS[name]
    env, info = _play(WRONG + code)
    assert info["reward"] == 0.0 and not env.verdict.solved
    assert reason in env.verdict.reason


@pytest.mark.parametrize("name", some(HONEST, ["the reference", "own exceptions"]))
def test_an_honest_solution_is_paid(name: str) -> None:
    env, info = _play(HONEST[name])
    assert info["reward"] == 1.0, env.verdict.reason


@pytest.mark.parametrize("name", some(QUICK[:5:4], QUICK[:1]))
def test_a_cheat_is_not_paid_a_share_either(name: str) -> None:
    env, info = _play(WRONG + CHEATS[name][0], dense_reward=True)
    assert info["reward"] == 0.0, (name, env.verdict)
