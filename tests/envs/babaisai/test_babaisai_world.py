"""The law of motion of BabaIsAI, on small maps and on random ones."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.babaisai import describe, find_plan
from envs.babaisai.levels import TASKS, make_level
from envs.babaisai.world import DIRECTIONS, PROPERTIES, THING_COLORS, Piece, Rules, World, read_rules, text_block, thing


def build(text: str) -> World:
    """Make a world from rows of words: `baba` is the thing, `BABA` its block, `.` nothing, `a/b` b on top of a."""
    rows = [row.split() for row in text.strip().splitlines()]
    world = World(len(rows[0]) + 2, len(rows) + 2)
    for y, row in enumerate(rows, start=1):
        for x, words in enumerate(row, start=1):
            for word in words.split("/") if words != "." else ():
                world.put(text_block(word.lower()) if word.isupper() else thing(word), x, y)
    world.reread()
    return world


def show(world: World) -> str:
    """The inverse of `build`."""
    rows = []
    for y in range(1, world.height - 1):
        cells = world.cells[y * world.width + 1 : (y + 1) * world.width - 1]
        words = [[p.name.upper() if p.is_text else p.name for p in cell] for cell in cells]
        rows.append(" ".join("/".join(cell) or "." for cell in words))
    return "\n".join(rows)


def after(text: str, *directions: str) -> str:
    """The last row of the map after some moves; what is above it holds the rules."""
    world = build(text)
    for direction in directions:
        world.step(direction)
    return show(world).splitlines()[-1]


YOU = "BABA IS YOU . . . .\n. . . . . . .\n"


def test_you_walk_and_the_wall_of_the_world_stops_you() -> None:
    assert after(YOU + "baba . . . . . .", "right", "right", "left") == ". baba . . . . ."
    assert after(YOU + "baba . . . . . .", "left", "down") == "baba . . . . . ."


def test_a_text_block_is_pushed() -> None:
    assert after(YOU + "baba KEY . . . . .", "right") == ". baba KEY . . . ."


def test_a_row_of_blocks_is_pushed_as_one() -> None:
    assert after(YOU + "baba KEY IS DOOR . . .", "right", "right") == ". . baba KEY IS DOOR ."


def test_a_row_of_blocks_against_the_edge_holds_you() -> None:
    assert after(YOU + ". . . . baba KEY DOOR", "right") == ". . . . baba KEY DOOR"


def test_a_gap_in_the_row_is_closed_before_the_rest_is_pushed() -> None:
    assert after(YOU + "baba KEY . DOOR . . .", "right") == ". baba KEY DOOR . . ."


def test_a_thing_without_rules_is_walked_over_and_left_behind() -> None:
    assert after(YOU + "baba key . . . . .", "right") == ". key/baba . . . . ."
    assert after(YOU + "baba key . . . . .", "right", "right") == ". key baba . . . ."


def test_a_block_pushed_over_a_thing_hides_it() -> None:
    world = build(YOU + "baba KEY key . . . .")
    world.step("right")
    assert show(world).splitlines()[-1] == ". baba key/KEY . . . ."
    assert "key 1 step to the right" not in describe(world, (2, 3)).splitlines()


def test_stop_holds_you_and_what_you_push() -> None:
    rules = "BABA IS YOU . . . .\nWALL IS STOP . . . .\n"
    assert after(rules + "baba wall . . . . .", "right") == "baba wall . . . . ."
    assert after(rules + "baba KEY wall . . . .", "right") == "baba KEY wall . . . ."


def test_push_makes_a_thing_movable() -> None:
    rules = "BABA IS YOU . . . .\nKEY IS PUSH . . . .\n"
    assert after(rules + "baba key DOOR . . . .", "right") == ". baba key DOOR . . ."


def test_breaking_the_stop_rule_opens_the_wall() -> None:
    text = ". . baba . wall\nWALL IS STOP . .\n. . . . .\nBABA IS YOU . ."
    held, free = build(text), build(text)
    for world, directions in ((held, ("right", "right")), (free, ("down", "up", "right", "right"))):
        for direction in directions:
            world.step(direction)
    assert (held.find_speaker(), free.find_speaker()) == ((4, 1), (5, 1))
    assert (held.rules.stop, free.rules.stop) == ({"wall"}, set())


def test_a_rule_forms_downwards_as_well_as_rightwards() -> None:
    world = build("BABA IS YOU . .\n. . . . KEY\nbaba IS . . .\n. . . . WIN")
    assert world.rules.win == set()
    for _ in range(3):
        world.step("right")
    assert world.rules.win == {"key"}


def test_rules_are_not_read_backwards_nor_upwards() -> None:
    assert build("WIN IS KEY\nYOU . .\nIS . .\nBABA . .").rules.listed == ()


def test_a_block_belongs_to_a_row_and_a_column_at_once() -> None:
    rules = build("BABA IS YOU\nIS . .\nWIN . .").rules
    assert rules.listed == (("baba", "you"), ("baba", "win"))


def test_entering_what_is_win_wins_and_pushing_something_there_does_not() -> None:
    rules = "BABA IS YOU . .\nKEY IS WIN . .\n"
    assert build(rules + "baba key . . .").step("right") == (True, False)
    assert build(rules + "baba DOOR key . .").step("right") == (False, False)


def test_entering_what_is_lose_loses() -> None:
    assert build("BABA IS YOU . .\nKEY IS LOSE . .\nbaba key . . .").step("right") == (False, True)


def test_a_rule_counts_only_from_the_step_after_it_was_made() -> None:
    world = build("BABA IS YOU . . . .\nbaba KEY . IS WIN . .\nkey . . . . . .")
    assert world.step("right") == (False, False)
    assert world.rules.win == {"key"}
    world.step("down")
    assert world.step("left") == (True, False)


def test_every_you_thing_moves_and_the_last_one_decides_the_outcome() -> None:
    rules = "BABA IS YOU . .\nKEY IS YOU . .\nDOOR IS WIN . .\n"
    world = build(rules + "baba . . key door")
    assert world.step("right").won
    assert show(world).splitlines()[-1] == ". baba . . door/key"
    assert not build(rules + "baba door . key .").step("right").won, "key moved last and found nothing"


def test_being_win_oneself_wins_only_by_standing_still_against_something() -> None:
    rules = "BABA IS YOU .\nBABA IS WIN .\n"
    assert not build(rules + "baba . . .").step("right").won
    assert build(rules + "baba . . .").step("left").won


def test_noun_is_noun_covers_each_thing_with_the_new_one() -> None:
    world = build("BABA IS YOU . .\nbaba KEY . IS DOOR\nkey . key . .")
    world.step("right")
    assert world.rules.swaps == (("key", "door"),)
    assert show(world).splitlines()[-1] == "key/door . key/door . ."


def test_without_a_you_rule_nothing_moves_and_nobody_speaks() -> None:
    world = build("BABA IS . .\nbaba KEY . .")
    assert world.step("right") == (False, False)
    assert show(world) == "BABA IS . .\nbaba KEY . ."
    assert world.find_speaker() is None


def test_the_observation_is_told_from_the_subject_of_the_last_you_rule() -> None:
    world = build("BABA IS YOU .\nKEY IS YOU .\nbaba . . key")
    assert world.find_speaker() == (4, 3)
    text = describe(world, (4, 3))
    assert text.startswith("Active rules:\nbaba is you\nkey is you\n\nObjects on the map:\n")
    assert text.endswith("\n"), "the speaker's own line is blank"
    assert "rule `baba` 3 step to the left and 2 step up" in text


def test_the_observation_says_steps_only_to_the_right_and_down() -> None:
    world = build(". . . DOOR .\n. . . . .\n. baba . . key\nBABA IS YOU . .\n. . ball . .")
    assert describe(world, world.find_speaker()).splitlines()[4:] == [
        "rule `door` 2 steps to the right and 2 step up",
        "key 3 steps to the right",
        "rule `baba` 1 step to the left and 1 step down",
        "rule `is` 1 step down",
        "rule `you` 1 step to the right and 1 step down",
        "ball 1 step to the right and 2 steps down",
    ]


def test_a_text_block_with_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="'fly'"):
        text_block("fly")


def read_by_lines(world: World) -> Rules:
    """Rules read the slow way: every row and column as a sequence of words, cut into triples."""
    found = []
    for stride, lines in ((0, range(1, world.height - 1)), (1, range(1, world.width - 1))):
        for line in lines:
            length = world.width if stride == 0 else world.height
            spots = [(i, line) if stride == 0 else (line, i) for i in range(length)]
            for a, b, c in zip(spots, spots[1:], spots[2:], strict=False):
                pieces = [world.top(*spot) for spot in (a, b, c)]
                if None not in pieces and [p.kind for p in pieces[:2]] == ["noun", "is"]:
                    found.append(((b[1], b[0], stride), pieces[0].name, pieces[2]))
    found.sort(key=lambda item: item[0])
    listed = [(noun, p.name) for _, noun, p in found if p.kind == "property"]
    swaps = [(noun, p.name) for _, noun, p in found if p.kind == "noun"]
    named = {prop: frozenset(n for n, p in listed if p == prop) for prop in PROPERTIES}
    return Rules(tuple(listed), tuple(swaps), **named)


WORDS = [*THING_COLORS, *(word.upper() for word in (*THING_COLORS, "is", "is", *PROPERTIES))]
moves = st.lists(st.sampled_from(sorted(DIRECTIONS)), min_size=1, max_size=25)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Small crowded maps with a YOU rule in most of them."""
    width, height = draw(st.integers(4, 7)), draw(st.integers(3, 5))
    cell = st.one_of(st.just("."), st.just("."), st.sampled_from(WORDS), st.just("baba"))
    rows = [" ".join(draw(st.lists(cell, min_size=width, max_size=width))) for _ in range(height)]
    first = " ".join(["BABA", "IS", "YOU", *["."] * (width - 3)])
    return build("\n".join([first, *rows]))


def pieces_of(world: World) -> set[Piece]:
    return set(itertools.chain.from_iterable(world.cells))


@settings(max_examples=150, deadline=None)
@given(worlds(), moves)
def test_pieces_are_never_lost_and_only_noun_is_noun_adds_any(world: World, directions: list[str]) -> None:
    before = pieces_of(world)
    for direction in directions:
        world.step(direction)
        now = pieces_of(world)
        assert before <= now
        assert before == now or world.rules.swaps
        assert sum(len(cell) for cell in world.cells) == len(now) - 1 + 2 * (world.width + world.height) - 4
        before = now


@settings(max_examples=150, deadline=None)
@given(worlds(), moves)
def test_the_rules_in_force_are_those_that_the_grid_spells(world: World, directions: list[str]) -> None:
    for direction in directions:
        world.step(direction)
        assert world.rules == read_rules(world.cells, world.width) == read_by_lines(world)


@settings(max_examples=100, deadline=None)
@given(worlds(), moves)
def test_text_blocks_never_share_a_cell_and_the_border_never_changes(world: World, directions: list[str]) -> None:
    border = [i for i, cell in enumerate(world.cells) if cell and cell[0].kind == "border"]
    for direction in directions:
        world.step(direction)
        assert all(sum(piece.is_text for piece in cell) <= 1 for cell in world.cells)
        assert all(len(world.cells[i]) == 1 and world.cells[i][0].kind == "border" for i in border)


@settings(max_examples=60, deadline=None)
@given(worlds(), moves, moves)
def test_a_copy_lives_its_own_life(world: World, directions: list[str], others: list[str]) -> None:
    twin, seen = world.copy(), show(world)
    for direction in directions:
        twin.step(direction)
    assert show(world) == seen
    again = world.copy()
    for direction in directions:
        again.step(direction)
    assert show(again) == show(twin)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_level_has_a_you_in_sight_and_what_its_task_promises(task: str) -> None:
    for seed in range(40):
        world = make_level(TASKS[task], np.random.RandomState(seed))
        assert world.find_speaker() is not None
        assert world.rules.listed == read_by_lines(world).listed
        has_win = bool(world.rules.win)
        assert has_win == (not TASKS[task].break_win or TASKS[task].second_win)
        two_rooms = TASKS[task].layout != "one_room"
        assert ("wall" in world.rules.stop) == (two_rooms and not TASKS[task].break_stop)


@pytest.mark.parametrize("task", ["make_win", "two_room-break_stop-make_win", "two_room-make_you"])
def test_a_plan_wins_when_it_is_followed_and_not_before(task: str) -> None:
    for seed in range(5):
        world = make_level(TASKS[task], np.random.RandomState(seed))
        plan = find_plan(world.copy())
        assert [world.step(direction).won for direction in plan] == [False] * (len(plan) - 1) + [True]


def test_no_plan_is_found_where_there_is_none() -> None:
    assert find_plan(build("BABA IS YOU .\nWALL IS STOP wall\nbaba . . wall\nKEY IS WIN wall")) is None
    assert find_plan(build("BABA IS . .\nbaba . key .\nKEY IS WIN .")) is None
