"""Games with free commands: what is taken for one command, and what happens to all the rest."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.errors import EnvironmentFault
from envs.text_game import MAX_CHARACTERS, CommandGame, Frame, GameSettings, clean_command


class Parrot(CommandGame):
    """Understands whatever begins with `say`, and `look`."""

    template_path = Path("unused.j2")
    heard: list[str]

    def start(self) -> Frame:
        self.heard = []
        return Frame("A parrot.")

    def try_command(self, command: str) -> Frame | None:
        if command.split()[0] not in ("say", "look"):
            return None
        self.heard.append(command)
        return Frame(command, reward=1.0)

    def render_prompt(self) -> str:
        return "Talk to the parrot."


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        ("take key", "take key"),
        ("  Take   the BBQ. ", "Take the BBQ"),
        ('**"go north"**', "go north"),
        ("> look", "look"),
        ("open box\nbecause it is there", "open box"),
        ("examine painter's box", "examine painter's box"),
        ("", None),
        ("take key. go north", None),
        ("take key then go north", None),
        ("take key, go north", None),
        ("идти на север", None),
        ("look\x00", None),
        ("a" * (MAX_CHARACTERS + 1), None),
    ],
)
def test_one_line_of_plain_words_is_a_command_and_nothing_else(
    answer: str, command: str | None
) -> None:
    assert clean_command(answer) == command


@settings(deadline=None)
@given(st.text())
def test_a_cleaned_command_is_short_plain_and_stays_as_it_is(answer: str) -> None:
    command = clean_command(answer)
    if command is not None:
        assert len(command) <= MAX_CHARACTERS and command.isascii() and command.isprintable()
        assert clean_command(command) == command


def test_a_command_that_the_game_does_not_understand_costs_a_turn_of_looking() -> None:
    game = Parrot(GameSettings(format_penalty=0.1))
    game.reset()
    info = game.step("ACTION: whistle")[2]
    assert (info["valid_action"], info["executed_action"], info["reward"]) == (False, "look", -0.1)
    info = game.step("ACTION: say hello")[2]
    assert (info["valid_action"], info["executed_action"], info["reward"]) == (
        True,
        "say hello",
        1.0,
    )
    assert game.heard == ["look", "say hello"]


def test_a_game_that_refuses_its_own_default_command_is_at_fault() -> None:
    game = Parrot(GameSettings())
    game.default_action = "wait"
    game.reset()
    with pytest.raises(EnvironmentFault, match="its own default command 'wait'"):
        game.step("whistle")
