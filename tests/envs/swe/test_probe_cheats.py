"""Cheats that look for what hidden tests expect, forge reports or remember: no form of a hidden
test pays them."""

import pytest

from envs.swe.verdict.evaluate import Verdict
from tests.cases import some
from tests.envs.swe.forms_repository import RIGHT, WRONG, forms_options
from tests.envs.swe.honest_variants import BILLS, ORDER
from tests.envs.swe.probe_cheats import PROBE_CHEATS
from tests.envs.swe.tiny_repository import judged, ordinary_run, played

pytestmark = pytest.mark.usefixtures("few_runs")


def _play(code: str, *commands: str) -> Verdict:
    return judged(forms_options(), {"shop/bills.py": code}, *commands)


QUICK = (
    "locals of the caller",
    "everything that the collector knows",
    "files and pipes of the judge",
    "what an earlier run left",
    "all values forged for all probes",
    "the probe helper replaced",
    "a process that ends itself",
)


@pytest.mark.parametrize("name", some(PROBE_CHEATS, QUICK))
def test_no_form_of_a_hidden_test_pays_a_cheat(name: str) -> None:
    verdict = _play(WRONG + PROBE_CHEATS[name])
    assert not verdict.solved and verdict.fail_to_pass == 0.0, verdict.reason


@pytest.mark.slow
def test_the_cheats_do_fool_the_tests_themselves() -> None:
    env = played(forms_options(), {})
    runs = {
        name: ordinary_run(env, {"shop/bills.py": WRONG + code})
        for name, code in PROBE_CHEATS.items()
    }
    fooled = {name: len(green) for name, green in runs.items() if green}
    assert len(fooled) >= 24 and max(fooled.values()) >= 10, fooled


@pytest.mark.parametrize("name", some(BILLS, list(BILLS)[:1]))
def test_an_honest_solution_is_paid_whatever_types_it_returns(name: str) -> None:
    verdict = _play(BILLS[name] + ORDER)
    assert verdict.solved, verdict.reason


def test_folders_that_the_agent_adds_do_not_change_the_probes() -> None:
    """What counts as the package under test decides which side of an assertion is observed."""
    cheat = WRONG + PROBE_CHEATS["locals of the caller"]
    assert (
        _play(cheat, "mkdir pytest unittest tests2 math; touch fractions.txt").fail_to_pass == 0.0
    )
    assert _play(RIGHT, "mkdir tests2 math").solved
