"""slime's own contract tests for plugins accept every hook of ours, in every checkout that SLIME_PATH names."""

from __future__ import annotations

import pytest

from tests.fixtures.frameworks import SLIME, failure_inside
from tests.slime.plugin_contracts import FILES


@pytest.mark.parametrize("contracts", FILES)
@pytest.mark.parametrize("framework", SLIME)
def test_slimes_contracts_accept_our_hooks(framework: str, contracts: str) -> None:
    failure = failure_inside(framework, "tests.slime.plugin_contracts", contracts)
    assert failure is None, failure
