"""The law of motion of BabaIsAI, on small maps and on random ones."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from envs.babaisai.world import (
    DIRECTIONS,
    PROPERTIES,
    THING_COLORS,
    Piece,
    World,
    read_rules,
    text_block,
    thing,
)


def build(text: str) -> World:
    """Make a world from rows of words: `baba` is the thing, `BABA` its block, `.` nothing, `a/b` b
    on top of a."""
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


def test_entering_what_is_win_wins_and_pushing_something_there_does_not() -> None:
    rules = "BABA IS YOU . .\nKEY IS WIN . .\n"
    assert build(rules + "baba key . . .").step("right") == (True, False)
    assert build(rules + "baba DOOR key . .").step("right") == (False, False)


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
    assert not build(rules + "baba door . key .").step("right").won, (
        "key moved last and found nothing"
    )


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
def test_pieces_are_never_lost_and_only_noun_is_noun_adds_any(
    world: World, directions: list[str]
) -> None:
    before = pieces_of(world)
    for direction in directions:
        world.step(direction)
        now = pieces_of(world)
        assert before <= now
        assert before == now or world.rules.swaps
        assert (
            sum(len(cell) for cell in world.cells)
            == len(now) - 1 + 2 * (world.width + world.height) - 4
        )
        before = now


@settings(max_examples=150, deadline=None)
@given(worlds(), moves)
def test_the_rules_in_force_are_those_that_the_grid_spells(
    world: World, directions: list[str]
) -> None:
    for direction in directions:
        world.step(direction)
        assert world.rules == read_rules(world.cells, world.width)
