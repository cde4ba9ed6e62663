"""NetHack and MiniHack in words, for `envs.gymnasium_text`: `make` is its `env.id`, `describe` its
`env.describe`.

The text is our own: the message, then the screen, the status, the things in sight with their
distance, and the inventory. BALROG's text needs its fork of NLE; `envs.balrog` plays it. The
actions have the names that BALROG uses.
"""

import random
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import yaml

from envs.errors import ConfigError, MissingDependencyError, did_you_mean
from envs.loading import import_extra
from envs.randomness import OwnRandomness
from envs.text_game import offset_in_words

_KEYS = ("blstats", "message", "screen_descriptions", "tty_chars", "inv_strs", "inv_letters")
_DIRECTIONS = {"N": "north", "E": "east", "S": "south", "W": "west"}
_DIRECTIONS |= {a + b: _DIRECTIONS[a] + _DIRECTIONS[b] for a in "NS" for b in "EW"}
_WORDS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
)
_MAX_THINGS = 25
_DEEPEST = 50


def make(
    task: str,
    *,
    actions: Sequence[str] | None = None,
    seeded: bool = True,
    render_mode: str | None = None,
    **kwargs: Any,
) -> gymnasium.Env:
    """Make the environment of a gymnasium id of NLE (`NetHackScore-v0`) or MiniHack
    (`MiniHack-Room-5x5-v0`).

    Args:
        actions: names of the actions to offer; null for the task's own.
        seeded: whether episodes follow their seed. NetHackChallenge forbids it; set
            `env.deterministic: false` as well.
        kwargs: keyword arguments of NLE or MiniHack, such as `character`.

    Raises:
        ConfigError: unknown task or action, or images were asked for.
        MissingDependencyError: NLE or MiniHack is not installed.
    """
    if render_mode is not None:
        raise ConfigError("env.vlm: NetHack is shown as text here; set it to false")
    import_extra("minihack" if task.startswith("MiniHack") else "nle", "NetHack", "nethack")
    if actions is not None:
        from nle import nethack

        known = {_name(action): action for action in nethack.ACTIONS}
        if unknown := [name for name in actions if name not in known]:
            hint = did_you_mean(
                unknown[0], known, f"there are {', '.join(list(known)[:8])}, ...", n=1
            )
            raise ConfigError(f"env.kwargs.actions: NetHack has no action {unknown[0]!r}; {hint}")
        kwargs["actions"] = tuple(known[name] for name in actions)
    # Without this, today's date decides over luck and night.
    kwargs.setdefault("fix_moon_phase", seeded)
    try:
        env = gymnasium.make(task, observation_keys=_KEYS, disable_env_checker=True, **kwargs)
    except gymnasium.error.Error as error:
        ids = [name for name in gymnasium.registry if name.startswith(("NetHack", "MiniHack"))]
        hint = did_you_mean(task, ids, "there are NetHackScore-v0, MiniHack-Room-5x5-v0, ...")
        raise ConfigError(f"NetHack has no task {task!r}; {hint}") from error
    except TypeError as error:
        raise ConfigError(
            f"env.kwargs: {task} refuses them: {str(error).split(' was raised from')[0]}"
        ) from error
    except ModuleNotFoundError as error:  # MiniHack's Boxoban levels are a download
        raise MissingDependencyError(f"NetHack cannot make {task}: {error}") from error
    return NetHackText(env, task, seeded)


class NetHackText(gymnasium.Wrapper):
    """NLE with named actions, seeds that decide the whole episode, endings told apart, and a
    measure of progress.

    `info["progression"]` is 1 for a completed task. In tasks without an end it is the share of
    NetHack's 50 levels that lie above the deepest level reached.
    """

    def __init__(self, env: gymnasium.Env, task: str, seeded: bool) -> None:
        super().__init__(env)
        self._task = task
        self._seeded = seeded
        self._depth = 1
        inner: Any = env.unwrapped
        names = [_name(action) for action in inner.actions]
        self.action_names = {name: _WORDS["effects"].get(name, "") for name in names}
        keys = zip(map(int, inner.actions), names, strict=True)
        self.action_aliases = {chr(key): name for key, name in keys if 32 < key < 127}
        self.default_action = next(
            (name for name in ("esc", "wait", "search") if name in names), names[0]
        )
        self._completes = hasattr(inner.StepStatus, "TASK_SUCCESSFUL")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        inner: Any = self.env.unwrapped
        self._random = OwnRandomness(seed or 0)
        if self._seeded and seed is not None:
            draw = random.Random(seed)
            try:
                inner.seed(core=draw.getrandbits(31), disp=draw.getrandbits(31), reseed=False)
            except RuntimeError as error:
                raise ConfigError(
                    f"{self._task} cannot be seeded ({error}); play NetHackScore-v0, or set "
                    "env.deterministic: false and env.kwargs: {seeded: false}"
                ) from error
        with self._random.in_place():
            observation, info = self.env.reset(seed=seed)
        self._depth = 1
        goal = next(goal for word, goal in _WORDS["goals"].items() if word in self._task)
        return observation, {**info, "mission": goal}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        with self._random.in_place():
            observation, reward, done, late, info = self.env.step(action)
        status = info["end_status"].name
        self._depth = max(self._depth, int(observation["blstats"][12]))
        deep = min(1.0, (self._depth - 1) / (_DEEPEST - 1))
        progress = float(status == "TASK_SUCCESSFUL") if self._completes else deep
        late = late or status == "ABORTED"
        return (
            observation,
            float(reward),
            done and not late,
            late,
            {**info, "progression": progress},
        )


def _name(action: Any) -> str:
    """Return the name of an action, such as `north`, `far north`, `kick`; of text characters it is
    the character."""
    kind = type(action).__name__
    if kind.startswith("Compass"):
        return "far " * kind.endswith("Longer") + _DIRECTIONS[action.name]
    if kind == "TextCharacters":
        return "space" if action.name == "SPACE" else chr(action)
    return "turnundead" if action.name == "TURN" else action.name.lower()


def describe(observation: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Put one observation into BALROG's two parts: the message stays in the history, the rest is
    shown once."""
    screen = "\n".join(_text(row).rstrip() for row in observation["tty_chars"][1:-2])
    things = zip(observation["inv_letters"], observation["inv_strs"], strict=True)
    parts = {
        "screen": textwrap.dedent(screen).strip("\n"),
        "status": _status(*observation["blstats"].tolist()),
        "in sight": "\n".join(_in_sight(observation)),
        "inventory": "\n".join(
            f"{chr(letter)}: {_text(name)}" for letter, name in things if letter
        ),
    }
    shown = [f"{name}:\n{text}" for name, text in parts.items() if text]
    message = _text(observation["message"]) or "(none)"
    return {"long_term_context": f"message: {message}", "short_term_context": "\n\n".join(shown)}


def _status(*stats: int) -> str:
    """Describe the player; the places of the numbers are those of NLE's `blstats`."""
    hunger = _WORDS["hunger"][stats[21]] if 0 <= stats[21] < len(_WORDS["hunger"]) else ""
    numbers = {
        "hit points": f"{stats[10]} of {stats[11]}",
        "power": f"{stats[14]} of {stats[15]}",
        "armour class": stats[16],
        "experience level": stats[18],
        "dungeon level": stats[12],
        "gold": stats[13],
        "move": stats[20],
    }
    return ", ".join([*(f"{name} {number}" for name, number in numbers.items()), hunger])


def _in_sight(observation: Mapping[str, np.ndarray]) -> list[str]:
    """Return the nearest things on the screen, with their distance from the player."""
    descriptions = observation["screen_descriptions"]
    x0, y0 = observation["blstats"][:2].tolist()
    found = []
    for y, x in np.argwhere(descriptions[:, :, 0] != 0).tolist():
        name = _text(descriptions[y, x])
        dx = x - x0
        dy = y - y0
        if name not in _WORDS["background"] and (dx or dy):
            where = offset_in_words(dy, dx, ("north", "south", "west", "east"))
            found.append((max(abs(dx), abs(dy)), name, dx, dy, where))
    return [f"{name}: {where}" for _, name, _, _, where in sorted(found)[:_MAX_THINGS]]


def _text(row: np.ndarray) -> str:
    return bytes(row).split(b"\0")[0].decode("latin-1").strip("\n") if row.any() else ""
