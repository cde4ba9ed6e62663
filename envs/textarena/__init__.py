"""Adapter to TextArena: its single-player games, by their ids.

A response's move goes to the game as it is. Whether it is valid is for the game to say: an invalid
one earns the format penalty, and the game ends after `invalid_moves_allowed` of them in a row.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.errors import ConfigError, MissingDependencyError, SlimeVerlogError, check_known
from envs.loading import import_extra
from envs.randomness import OwnRandomness
from envs.text_game import Frame, GameSettings, TextGame
from slime_verlog import Field

MAX_CHARACTERS = 300
"""Characters of a longer response are not passed to the game: its parsers are not made for them."""

_MOVE_FORMAT = (
    "Choose your next move. Answer in exactly this form:\n"
    "THINK: your reasoning, step by step\n"
    "ACTION: your move, in the form that the game asks for"
)


class TextArenaSettings(GameSettings):
    """Settings of TextArena's games."""

    no_pictures = "TextArena's games have no pictures"

    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the game's class, in place of those that its id stands for, such as
    {max_turns: 30}."""
    invalid_moves_allowed: int | None = Field(None, ge=0)
    """Invalid moves in a row after which another one ends the game; null for the game's own number,
    usually 1."""
    max_steps: int | None = Field(None, ge=1)
    """Turns after which an episode is truncated, invalid moves included; null for 200. Most games
    end earlier."""


class TextArena(TextGame):
    """One episode of a single-player game; `game` is TextArena's own object."""

    settings: TextArenaSettings
    settings_model = TextArenaSettings
    template_path = Path(__file__).with_name("prompt.j2")
    answer_format = _MOVE_FORMAT
    default_action = "no move"
    max_steps = 200

    def __init__(self, task: str, seed: int, settings: TextArenaSettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        self._library = import_extra("textarena", "TextArena", "textarena")
        known = self._library.envs.registration.ENV_REGISTRY
        # Names with these endings are wrappers, which are not used here.
        self._id = task.removesuffix("-raw").removesuffix("-train")
        ids = [other for other in known if f"{other}-raw" in known]
        examples = "there are GuessTheNumber-v0, TowerOfHanoi-v0, 2048-v0, ..."
        check_known(self._id, ids, f"TextArena has no game {task!r}", examples)
        wrappers = known[self._id].default_wrappers or ()
        # TextArena's own wrapper puts moves without brackets into them.
        self._brackets = self._library.wrappers.ActionFormattingWrapper in wrappers
        self.game: Any = None

    def start(self) -> Frame:
        self._random = OwnRandomness(self.seed)
        with self._random.in_place(), _explained(self._id):
            self.game = self._library.make(f"{self._id}-raw", **self.settings.kwargs)
            try:
                self.game.reset(num_players=1, seed=self.seed)
                alone = isinstance(self.game.state, self._library.SinglePlayerState)
            except AssertionError:  # of a number of players
                alone = False
            if not alone:
                advice = f"choose a single-player game, such as {DEFAULT_TASK}"
                raise ConfigError(f"TextArena's {self._id} is for several players; {advice}")
        if self.settings.invalid_moves_allowed is not None:
            self.game.state.error_allowance = self.settings.invalid_moves_allowed
        self._board = ""
        kinds = self._library.ObservationType
        messages = self.game.get_observation()[1]
        self._rules = "\n\n".join(
            str(text).strip() for _, text, kind in messages if kind == kinds.PROMPT
        )
        return self._frame(self._read(messages))

    def play(self, action: str) -> Frame:
        """Pass the move to the game."""
        return self.attempt(action)[1]

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        if len(candidate) > MAX_CHARACTERS:
            return None, self._frame(
                f"Your move has more than {MAX_CHARACTERS} characters. The game did not read it."
            )
        move = candidate
        if self._brackets and "[" not in move and "]" not in move:
            move = f"[{move}]"
        state = self.game.state
        errors = self.game.state.error_count
        with self._random.in_place():
            self.game.step(move)
        outcome = state.game_info[0] if state.done else {}
        text = self._read(self.game.get_observation()[1])
        reason = str(outcome.get("reason", ""))
        valid = state.error_count <= errors and not outcome.get("invalid_move")
        return candidate if valid else None, self._frame("\n".join(filter(None, (text, reason))))

    def prompt_variables(self) -> dict[str, Any]:
        return {**super().prompt_variables(), "rules": self._rules, "task": self.task}

    def close(self) -> None:
        self.game = None
        self._running = False

    def _read(self, messages: Sequence[tuple[int, str, Any]]) -> str:
        """Return the game's messages without prompt, the player's moves and the board, which is
        kept in `_board`."""
        kinds = self._library.ObservationType
        for _, text, kind in messages:
            if kind == kinds.GAME_BOARD:
                self._board = str(text).strip("\n")
        # Some games mix up the arguments of their messages, so that the kind is the player's own
        # move.
        read = (kinds.GAME_ACTION_DESCRIPTION, kinds.GAME_MESSAGE, kinds.GAME_ADMIN)
        return "\n".join(str(text).strip() for _, text, kind in messages if kind in read)

    def _frame(self, text: str) -> Frame:
        state = self.game.state
        # Some games mix up an outcome's reward and its reason.
        paid = (state.rewards or {}).get(0) if state.done else None
        reward = float(paid) if isinstance(paid, int | float) else 0.0
        return Frame(
            long_term=text if text or self._board else "The game begins.",
            short_term=self._board,
            reward=reward,
            terminated=bool(state.done),
            progression=min(max(reward, 0.0), 1.0),
        )


SETTINGS = TextArenaSettings
DEFAULT_TASK = "GuessTheNumber-v0"
build_env = TextArena.from_sample


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Explain to the user why a game cannot be made: several players, missing word lists, a missing
    key or package."""
    import nltk

    download = nltk.download
    # Games download on import, in every worker.
    nltk.download = lambda names, *_, **__: _check_data(name, names)
    try:
        yield
    except SlimeVerlogError:
        raise
    except Exception as error:
        raise ConfigError(
            f"TextArena cannot make {name}: {type(error).__name__}: {error}"
        ) from error
    finally:
        nltk.download = download


def _check_data(game: str, names: str | Sequence[str]) -> bool:
    """Stand in for `nltk.download`: raise an error if the data is not installed."""
    import nltk

    for name in [names] if isinstance(names, str) else names:
        found = False
        for kind in ("corpora", "taggers", "tokenizers"):
            with contextlib.suppress(LookupError):
                found = bool(nltk.data.find(f"{kind}/{name}"))
        if not found:
            raise MissingDependencyError(
                f"TextArena's {game} needs NLTK's data {name!r}, which is not downloaded during a "
                f"run; install it on every node with: python -m nltk.downloader {name}"
            )
    return True
