"""Tests that the agent can read are probed with other arguments too, unless the instance says
otherwise."""

import json
from pathlib import Path

import pytest

from envs.swe.verdict.instances import load_instances
from tests.cases import some
from tests.envs.swe.honest_variants import ORDERS
from tests.envs.swe.orders_repository import ROW, orders_options
from tests.envs.swe.tiny_repository import judged

pytestmark = pytest.mark.usefixtures("few_runs")

HARD_CODED = """\
def parse(text):
    if text == "ten":
        raise ValueError(text)
    return float(text)


def tax(price):
    return 19.0 if price == 100 else price * 0.2


def names(orders):
    return ["al", "bo"] if orders == ["bo", "al", "bo"] else sorted(orders)
"""


def _paid(folder: Path, code: str, **change: object) -> bool:
    """Play the shop's orders without its hidden tests."""
    options = orders_options()
    row = load_instances(str(options["instances"]))["shop_orders"].row()
    red = [test for test in ROW["FAIL_TO_PASS"] if "hidden" not in test]
    path = folder / "instances.json"
    path.write_text(
        json.dumps(
            [{**row, "test_patch": "", "FAIL_TO_PASS": red, "DRAW_ARGUMENTS": True, **change}]
        )
    )
    return judged({**options, "instances": str(path)}, {"shop/orders.py": code}).solved


def test_hard_coded_answers_are_found_out_by_other_arguments(tmp_path: Path) -> None:
    assert not _paid(tmp_path, HARD_CODED)


@pytest.mark.parametrize("name", some(ORDERS, ["fractions"]))
def test_honest_solutions_are_paid_for_other_arguments_too(tmp_path: Path, name: str) -> None:
    assert _paid(tmp_path, ORDERS[name])


def test_an_instance_can_switch_other_arguments_off(tmp_path: Path) -> None:
    assert _paid(tmp_path, HARD_CODED, DRAW_ARGUMENTS=False)
