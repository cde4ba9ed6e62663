"""Base of games with one free command per turn, where only the game can tell whether it understood.

One response is one command and one turn. A command that the game does not understand does not change it.
"""

import abc
import re

from envs.errors import EnvironmentFault
from envs.text_game import Frame, TextGame

COMMAND_FORMAT = (
    "Choose your next move. Answer in exactly this form:\nTHINK: your reasoning, step by step\nACTION: one command"
)

MAX_CHARACTERS = 100
_COMMAND = re.compile(r"[a-z0-9][a-z0-9 '-]*", re.IGNORECASE)
# Text adventures read the words after these as a second command in the same turn.
_JOINING = frozenset({"and", "then"})


class CommandGame(TextGame):
    """A game with free commands. Subclasses implement `start` and `try_command`, and may restrict `translate`."""

    answer_format = COMMAND_FORMAT
    actions = ()
    default_action = "look"

    @abc.abstractmethod
    def try_command(self, command: str) -> Frame | None:
        """Execute the command; None, without any change, if the game does not understand it."""

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        command = self.translate(candidate)
        frame = self.try_command(command) if command is not None else None
        if frame is None:
            return None, self.play(self.default_action)
        return command, frame

    def play(self, action: str) -> Frame:
        frame = self.try_command(action)
        if frame is None:
            raise EnvironmentFault(f"the game does not understand its own default command {action!r}")
        return frame

    def translate(self, candidate: str) -> str | None:
        return clean_command(candidate)


def clean_command(candidate: str) -> str | None:
    """Read the first line as one command of plain words, without quotes and markup; None if it is not one."""
    lines = candidate.strip().splitlines()
    if not lines or len(lines[0]) > 2 * MAX_CHARACTERS:
        return None
    command = " ".join(lines[0].strip("\"'`*>. \t").split())
    if len(command) > MAX_CHARACTERS or not _COMMAND.fullmatch(command):
        return None
    return None if _JOINING & set(command.lower().split()) else command


def list_commands(commands: list[str] | tuple[str, ...]) -> str:
    """Return the line of the observation that lists the commands that would work now."""
    return f"Commands that work now: {', '.join(commands)}."
