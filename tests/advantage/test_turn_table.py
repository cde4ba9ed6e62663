"""The turn table is decoded exactly, and everything else is refused."""

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage.errors import TurnTableError
from advantage.turn_table import (
    VERSION,
    TurnKind,
    TurnRow,
    TurnSpan,
    decode_row,
    encode_row,
    read_columns,
    read_turn_table,
)

IDS = st.integers(0, 2**53 - 1)


@st.composite
def rows(draw: st.DrawFn) -> TurnRow:
    if draw(st.booleans()):
        return TurnRow(draw(IDS), draw(IDS), TurnKind.BOOTSTRAP)
    turns, at = [], 0
    for _ in range(draw(st.integers(1, 6))):
        start = at + draw(st.integers(0, 40))
        at = start + draw(st.integers(0, 40))
        action = draw(st.integers(start, at - 1)) if at > start and draw(st.booleans()) else -1
        anchor = draw(st.one_of(st.just(-1), IDS))
        reward, staleness = (
            draw(st.floats(allow_nan=False, allow_infinity=False)),
            draw(st.integers(-1, 9)),
        )
        skips = draw(st.integers(0, 3))
        turns.append(
            TurnSpan(start, at, reward, action, anchor, staleness, draw(st.booleans()), skips)
        )
    kind = draw(st.sampled_from([TurnKind.TURN, TurnKind.HELD_OUT]))
    ends = draw(st.booleans()), draw(st.booleans())
    state = draw(st.one_of(st.just(-1), st.integers(at, at + 9)))
    return TurnRow(
        draw(IDS), draw(st.integers(0, 2**52)), kind, *ends, tuple(turns), draw(IDS), state
    )


def entries_of(table: list[TurnRow]) -> list[dict[str, object]]:
    """The entry of each turn and of each bootstrap state, row by row."""
    entries: list[dict[str, object]] = []
    for sample, row in enumerate(table):
        about = {"sample": sample, "segment": row.segment, "group": row.group}
        index = row.first_turn
        for turn in row.turns:
            index += turn.skips
            ends = {
                name: getattr(row, name) and turn is row.turns[-1]
                for name in ("terminated", "truncated")
            }
            kind = {"bootstrap": False, "held_out": row.kind is TurnKind.HELD_OUT}
            entries.append(about | ends | kind | {"index": index} | asdict(turn))
            index += 1
        if not row.turns or row.bootstrap != -1:
            place = max(row.bootstrap, 0)
            ends = {"terminated": False, "truncated": False, "bootstrap": True, "held_out": False}
            entries.append(about | ends | {"index": index} | asdict(TurnSpan(place, place, 0.0)))
    for entry in entries:
        del entry["skips"]
    return entries


@settings(deadline=None)
@given(st.lists(rows(), max_size=6))
def test_all_rows_at_once_are_decoded_as_one_by_one(table: list[TurnRow]) -> None:
    columns = read_columns([encode_row(row) for row in table], [10**6] * len(table))
    names, values = zip(*vars(columns).items(), strict=True)
    entries = zip(*(column.tolist() for column in values), strict=True)
    assert [dict(zip(names, entry, strict=True)) for entry in entries] == entries_of(table)


PLAIN = (int, float, bool)


@settings(deadline=None)
@given(rows())
def test_an_entry_is_plain_and_decodes_to_the_same_row(row: TurnRow) -> None:
    version, *numbers, turns = encode_row(row)
    assert version == VERSION and all(type(x) in PLAIN for x in numbers)
    assert all(type(x) in PLAIN for turn in turns for x in turn)
    assert decode_row(encode_row(row)) == row
    assert decode_row(json.loads(json.dumps(encode_row(row)))) == row


ANYTHING = st.one_of(
    st.floats(), st.integers(-3, 3), st.booleans(), st.none(), st.text(max_size=2), st.just(2**53)
)


@settings(deadline=None, max_examples=60)
@given(rows(), st.data())
def test_a_damaged_entry_is_a_named_error_or_another_valid_row(
    row: TurnRow, data: st.DataObject
) -> None:
    entry = json.loads(json.dumps(encode_row(row)))
    part = data.draw(st.sampled_from([entry, *entry[-1]]))
    place = data.draw(st.integers(0, len(part) - 1))
    damage = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if damage == "replace":
        part[place] = data.draw(ANYTHING)
    elif damage == "remove":
        del part[place]
    else:
        part.insert(place, data.draw(ANYTHING))
    try:
        found = decode_row(entry)
    except TurnTableError:
        with pytest.raises(TurnTableError, match="sample 0"):
            read_columns([entry], [10**6])
    else:
        assert decode_row(encode_row(found)) == found


FOREIGN = [
    "a text prompt",
    None,
    (4, 0, 0),
    (True,),
    torch.arange(9),
]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_prompt_names_the_converter_that_is_not_configured(foreign: object) -> None:
    with pytest.raises(
        TurnTableError, match=r"sample 0: .*--custom-convert-samples-to-train-data-path"
    ):
        read_turn_table({"prompt": [foreign], "response_lengths": [3]}, keep=False)


def test_a_turn_past_the_response_is_refused_with_its_sample() -> None:
    row = encode_row(TurnRow(4, 0, turns=(TurnSpan(0, 3, 1.0),)))
    with pytest.raises(TurnTableError, match="sample 1: its last turn ends at token 3"):
        read_columns([row, row], [3, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TurnSpan(2, 1, 0.0), "before its start 2"),
        (lambda: TurnSpan(0, 1, float("nan")), "finite"),
        (lambda: TurnSpan(0, 2, 0.0, 2), "action_start"),
        (lambda: TurnSpan(0.5, 2, 0.0), "integer"),
        (lambda: TurnRow(-1, 0, turns=(TurnSpan(0, 1, 0.0),)), "segment must be"),
        (lambda: TurnRow(2**53, 0, turns=(TurnSpan(0, 1, 0.0),)), "2\\*\\*53"),
        (lambda: TurnSpan(0, 2, 0.0, staleness=-2), "staleness"),
        (lambda: TurnRow(1, 0, TurnKind.BOOTSTRAP, terminated=True), "bootstrap"),
        (lambda: TurnRow(1, 0, turns=(TurnSpan(0, 3, 0.0), TurnSpan(2, 4, 0.0))), "overlap"),
    ],
)
def test_an_impossible_row_is_refused_when_it_is_made(make: object, message: str) -> None:
    with pytest.raises(TurnTableError, match=message):
        make()
