"""Plays one built TextWorld game: sends commands, returns cleaned text, score and outcome."""

import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import textworld

# Jericho warns about every game that is not in its list; TextWorld reads score and state from the
# game's own file.
warnings.filterwarnings("ignore", message="Game '.*' is not fully supported")

# A number without a room's name begins at the first of the blanks before it; other starts would
# take quadratic time.
_STATUS_LINE = re.compile(r"-=[^\n]*=-\s*-?\d+/\d+$|(?<!\s)\s*-?\d+/\d+$")
_MAX_STATUS_CHARS = 200
_AFTER_THE_END = "Would you like to RESTART"
_parsing = threading.Lock()
"""TextWorld reads all games with one parser, and threads that used it at the same time would break
its stack."""
_BLANK_LINES = re.compile(r"\n{3,}")

# Verbs of Inform besides TextWorld's own. All others are refused: they control the interpreter
# (save and script write files, quit asks a question, undo takes turns back) or print hidden
# information.
_SYNONYMS = frozenset(
    """
    check describe discard e east get goal help i inv l n north pick remove s shut south throw w wait walk west
    x z run
    """.split()  # noqa: SIM905 - reads better as words
)


@dataclass(frozen=True)
class Moment:
    """The game's reply to a command. `commands` and `plan` are empty unless the player tracks the
    state."""

    text: str
    score: int
    won: bool
    lost: bool
    commands: tuple[str, ...]
    """Commands that would work now."""
    plan: tuple[str, ...]
    """Commands that win from here, as far as the game knows."""


class Player:
    """One running game. `track` follows its state, which takes several times as long as the game
    itself."""

    def __init__(self, game_file: Path, *, track: bool) -> None:
        wanted = {"admissible_commands": True, "policy_commands": True} if track else {}
        infos = textworld.EnvInfos(
            won=True, lost=True, score=True, max_score=True, objective=True, **wanted
        )
        with _parsing:
            self._env = textworld.start(str(game_file), infos)
        self._env.seed(0)
        self._turns = 0
        self.objective = ""
        self.max_score = 1
        self.walkthrough: tuple[str, ...] = ()
        self._verbs: frozenset[str] = _SYNONYMS

    def reset(self) -> Moment:
        state: Any = self._env.reset()
        self._turns = state.moves
        self.objective = " ".join(state.objective.split())
        self.max_score = max(1, state.max_score)
        self.walkthrough = tuple(state.game.metadata.get("walkthrough") or ())
        self._verbs = _SYNONYMS | {verb.lower() for verb in state.verbs}
        # Drop the banner and the objective before the first room; the prompt tells the objective.
        opening = (
            state.feedback.rpartition(state.objective)[2] if state.objective else state.feedback
        )
        return _moment(state, opening)

    def send(self, command: str) -> Moment | None:
        """Play a command; None if the game did not count a turn, because it did not understand the
        command."""
        if command.split()[0].lower() not in self._verbs:
            return None
        state: Any
        state, _, done = self._env.step(command)
        if not done and state.moves == self._turns:
            return None
        self._turns = state.moves
        return _moment(state, state.feedback)

    def close(self) -> None:
        self._env.close()


def _moment(state: Any, feedback: str) -> Moment:
    return Moment(
        text=_clean(feedback),
        score=state.score or 0,
        won=bool(state.won),
        lost=bool(state.lost),
        commands=tuple(state.admissible_commands or ()),
        plan=tuple(state.policy_commands or ()),
    )


def _clean(feedback: str) -> str:
    text = feedback.partition(_AFTER_THE_END)[0].rstrip()
    # Search only the end: the pattern takes quadratic time on long runs of white space.
    head = text[:-_MAX_STATUS_CHARS]
    tail = text[-_MAX_STATUS_CHARS:]
    text = (head + _STATUS_LINE.sub("", tail)).rstrip().removesuffix(">")
    return _BLANK_LINES.sub("\n\n", "\n".join(line.rstrip() for line in text.splitlines())).strip()
