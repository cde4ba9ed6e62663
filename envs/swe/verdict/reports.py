"""The schema of what `pytest_script.py` reports from the sandbox. Anything else that comes out of
there is refused.

Invariant: a record is plain data of JSON, and its fields have the declared types.
"""

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from envs.swe.sandbox.supervise import Outcome

Number = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


class NotCounted(Exception):
    """Nothing that a tree or a run of its tests shows counts; the text says why."""


class ProbeRecord(BaseModel):
    """What one probe reported once. `value`, `message` and `expected` are as `encoding.encode`
    writes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    probe: Number
    test: tuple[StrictStr, Number] | None
    value: Any = None
    raised: list[StrictStr] | None = None
    message: Any = None
    drawn: StrictBool = False
    expected: Any = None
    seen: list[StrictStr] = []

    def has(self, name: str) -> bool:
        """Whether the script wrote this field."""
        return name in self.model_fields_set


class TestRun(BaseModel):
    """An ordinary run of pytest, which came to its end."""

    __test__ = False
    model_config = ConfigDict(extra="forbid", frozen=True)
    code: StrictInt
    """pytest's exit status."""
    collected: list[StrictStr]
    """All tests of the files that were run, in pytest's order."""
    uncollectable: list[StrictStr]
    """Files and folders that pytest could not collect."""
    outcomes: dict[StrictStr, Literal["passed", "xfailed", "skipped", "failed"]]
    """Outcome of every test that ran."""

    @property
    def green(self) -> frozenset[str]:
        """Tests that passed, or failed as their `xfail` mark says."""
        return frozenset(
            test for test, outcome in self.outcomes.items() if outcome in ("passed", "xfailed")
        )


R = TypeVar("R", bound=BaseModel)


def read_records(kind: type[R], outcome: Outcome) -> list[R]:
    """Read the records of a run, one per line; raises NotCounted if it was stopped, or if a line is
    not a record."""
    if outcome.stopped:
        raise NotCounted(f"the tests were stopped by their {outcome.stopped} limit")
    try:
        lines = outcome.report.splitlines()
        return [kind.model_validate(json.loads(line, parse_constant=_refuse)) for line in lines]
    except (ValueError, RecursionError) as error:
        raise NotCounted("the report was tampered with") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
