"""The schema of what `pytest_script.py` reports from the sandbox. Anything else that comes out of there is refused.

Invariant: a record is plain data of JSON, and its fields have the declared types.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

Kind = Literal["collected", "marked", "uncollectable", "phase", "end"]
Number = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


class TamperedError(Exception):
    """A report holds what the script does not write; the text says what in a few words."""


class ProbeRecord(BaseModel):
    """What one probe reported once. `value`, `message` and `expected` are as `encoding.encode` writes them."""

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


class TestRecord(BaseModel):
    """One step of an ordinary run of pytest: its kind, and the fields of that kind."""

    __test__ = False
    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Kind
    id: StrictStr = ""
    ids: list[StrictStr] = []
    outcome: Literal["passed", "skipped", "failed"] = "failed"
    xfail: StrictBool = False
    code: StrictInt | None = None


R = TypeVar("R", bound=BaseModel)


def read_records(kind: type[R], report: bytes) -> Iterator[R]:
    """Read the records of a report, one per line; raises TamperedError for the first line that is not one."""
    for line in report.splitlines():
        try:
            yield kind.model_validate(json.loads(line, parse_constant=_refuse))
        except (ValueError, RecursionError, ValidationError) as error:
            raise TamperedError("was tampered with") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
