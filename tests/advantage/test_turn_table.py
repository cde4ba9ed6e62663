"""The turn table is decoded exactly, and everything else is refused."""

import json
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage.errors import TurnTableError
from advantage.turn_table import (
    VERSION,
    TurnColumns,
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
        reward, staleness = draw(st.floats(allow_nan=False, allow_infinity=False)), draw(st.integers(-1, 9))
        turns.append(TurnSpan(start, at, reward, action, anchor, staleness, draw(st.booleans())))
    kind = draw(st.sampled_from([TurnKind.TURN, TurnKind.HELD_OUT]))
    return TurnRow(draw(IDS), draw(IDS), kind, draw(st.booleans()), draw(st.booleans()), tuple(turns), draw(IDS))


def rows_of(columns: TurnColumns) -> list[TurnRow]:
    """The rows that the columns describe, but for group, anchors and the flags of turns before a sample's last."""
    entries = [[x.item() for x in entry] for entry in zip(*vars(columns).values(), strict=True)]
    names, rows = list(vars(columns)), []
    for _, group in groupby(entries, key=lambda entry: entry[0]):
        turns = [dict(zip(names, entry, strict=True)) for entry in group]
        first, last = turns[0], turns[-1]
        held_out = TurnKind.HELD_OUT if first["held_out"] else TurnKind.TURN
        kind = TurnKind.BOOTSTRAP if first["bootstrap"] else held_out
        spans = tuple(
            TurnSpan(
                *(int(t["start"]), int(t["end"]), t["reward"]),
                *(int(t["action_start"]), int(t["anchor"]), int(t["staleness"]), t["moves"]),
            )
            for t in turns
            if kind is not TurnKind.BOOTSTRAP
        )
        assert [t["index"] for t in turns] == [first["index"] + k for k in range(len(turns))]
        assert not any(t["terminated"] or t["truncated"] for t in turns[:-1])
        assert all(t["bootstrap"] == first["bootstrap"] and t["held_out"] == first["held_out"] for t in turns)
        assert {t["segment"] for t in turns} == {first["segment"]} and {t["group"] for t in turns} == {first["group"]}
        rows.append(
            TurnRow(
                *(int(first["segment"]), int(first["index"]), kind, last["terminated"], last["truncated"], spans),
                group=int(first["group"]),
            )
        )
    return rows


@settings(deadline=None)
@given(st.lists(rows(), max_size=6))
def test_all_rows_at_once_are_decoded_as_one_by_one(table: list[TurnRow]) -> None:
    columns = read_columns([encode_row(row) for row in table], [10**6] * len(table))
    assert rows_of(columns) == table


PLAIN = (int, float, bool)


@settings(deadline=None)
@given(rows())
def test_an_entry_is_plain_and_decodes_to_the_same_row(row: TurnRow) -> None:
    version, *numbers, turns = encode_row(row)
    assert version == VERSION and all(type(x) in PLAIN for x in numbers)
    assert all(type(x) in PLAIN for turn in turns for x in turn)
    assert decode_row(encode_row(row)) == row
    assert decode_row(json.loads(json.dumps(encode_row(row)))) == row


ANYTHING = st.one_of(st.floats(), st.integers(-3, 3), st.booleans(), st.none(), st.text(max_size=2), st.just(2**53))


@settings(deadline=None, max_examples=300)
@given(rows(), st.data())
def test_a_damaged_entry_is_a_named_error_or_another_valid_row(row: TurnRow, data: st.DataObject) -> None:
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


FOREIGN = ["a text prompt", [{"role": "user"}], None, (), (4, 0, 0), (True,), torch.arange(9), torch.zeros(9).double()]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_prompt_names_the_converter_that_is_not_configured(foreign: object) -> None:
    with pytest.raises(TurnTableError, match=r"sample 0: .*--custom-convert-samples-to-train-data-path"):
        read_turn_table({"prompt": [foreign], "response_lengths": [3]}, keep=False)


def test_a_missing_table_names_the_converter_that_is_not_configured() -> None:
    with pytest.raises(TurnTableError, match="--custom-convert-samples-to-train-data-path"):
        read_turn_table({"response_lengths": [3]}, keep=False)


def test_popping_the_table_takes_it_out_of_the_batch() -> None:
    row = TurnRow(4, 0, turns=(TurnSpan(0, 3, 1.0),))
    batch = {"prompt": [encode_row(row)], "response_lengths": [3]}
    assert rows_of(read_turn_table(batch, keep=False)) == [row]
    assert "prompt" not in batch


def test_a_turn_past_the_response_is_refused_with_its_sample() -> None:
    row = encode_row(TurnRow(4, 0, turns=(TurnSpan(0, 3, 1.0),)))
    with pytest.raises(TurnTableError, match="sample 1: its last turn ends at token 3"):
        read_columns([row, row], [3, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TurnSpan(2, 1, 0.0), "start <= end"),
        (lambda: TurnSpan(0, 1, float("nan")), "finite"),
        (lambda: TurnSpan(0, 2, 0.0, 2), "action_start"),
        (lambda: TurnSpan(0.5, 2, 0.0), "integer"),
        (lambda: TurnRow(-1, 0, turns=(TurnSpan(0, 1, 0.0),)), "negative"),
        (lambda: TurnRow(2**53, 0, turns=(TurnSpan(0, 1, 0.0),)), "2\\*\\*53"),
        (lambda: TurnSpan(0, 2, 0.0, anchor=-2), "anchor"),
        (lambda: TurnSpan(0, 2, 0.0, staleness=-2), "staleness"),
        (lambda: TurnRow(1, 0, TurnKind.BOOTSTRAP, group=-2), "group"),
        (lambda: TurnRow(1, 0), "at least one turn"),
        (lambda: TurnRow(1, 0, TurnKind.BOOTSTRAP, terminated=True), "bootstrap"),
        (lambda: TurnRow(1, 0, turns=(TurnSpan(0, 3, 0.0), TurnSpan(2, 4, 0.0))), "overlap"),
    ],
)
def test_an_impossible_row_is_refused_when_it_is_made(make: object, message: str) -> None:
    with pytest.raises(TurnTableError, match=message):
        make()
