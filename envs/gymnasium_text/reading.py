"""Puts the observations of gymnasium environments into text: text entries, what `render` prints, or numbers."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium import spaces

from envs.errors import ConfigError, did_you_mean
from envs.loading import load_attribute

_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLORED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0?m", re.DOTALL)


def prints_text(env: gymnasium.Env) -> bool:
    """Whether the environment's observations hold no text, while its `render` can return some."""
    return not _holds_text(env.observation_space) and "ansi" in (env.metadata.get("render_modes") or ())


def observation_reader(env: gymnasium.Env, describe: str | None, text_key: str | None) -> Callable[[Any], Any]:
    """Return the function from observation to text; raises ConfigError for no text or a wrong `text_key`."""
    space = env.observation_space
    if describe:
        return load_attribute(describe, "env.describe")
    if isinstance(space, spaces.Text):
        return lambda observation: observation
    if text_key is not None or _holds_text(space):
        key = _find_entry(env, text_key)
        return lambda observation: observation[key]
    if env.render_mode == "ansi":
        return lambda _: name_colors(str(env.render()))
    if not _holds_only_numbers(space):
        raise ConfigError(
            f"{env} observes {space}, which is not text; set env.describe to the import path of a function that "
            "returns the text of an observation"
        )
    return lambda observation: describe_numbers(space, observation)


def name_colors(text: str) -> str:
    """Replace a terminal's colors, which often mark the player, by their names: `[red S]FFF`."""

    def named(found: re.Match[str]) -> str:
        codes = [int(code) for code in found[1].split(";") if code]
        names = [_COLORS[code % 10] for code in codes if code // 10 in (3, 4, 9) and code % 10 < len(_COLORS)]
        return f"[{' '.join([*names, found[2]])}]"

    return re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", _COLORED.sub(named, text))


def describe_numbers(space: gymnasium.Space, value: Any) -> str:
    """Write the numbers of an observation: one line per entry of a Dict, and one line for the parts of a Tuple."""
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {describe_numbers(part, value[key])}" for key, part in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(describe_numbers(part, item) for part, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    return str(value.tolist())


def _find_entry(env: gymnasium.Env, key: str | None) -> str:
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        raise ConfigError(f"env.text_key is set, but {env} observes {space}, which has no entries; remove it")
    if key is None:
        texts = [name for name, part in space.spaces.items() if isinstance(part, spaces.Text)]
        key = "text" if "text" in space.spaces else texts[0] if len(texts) == 1 else None
    if key is None:
        raise ConfigError(f"set env.text_key or env.describe: which of {', '.join(space.spaces)} is the text?")
    if key not in space.spaces:
        hint = did_you_mean(key, space.spaces, f"they have {', '.join(space.spaces)}")
        raise ConfigError(f"env.text_key: observations have no entry {key!r}; {hint}")
    return key


def _holds_text(space: gymnasium.Space) -> bool:
    if isinstance(space, spaces.Dict):
        return "text" in space.spaces or any(isinstance(part, spaces.Text) for part in space.spaces.values())
    return isinstance(space, spaces.Text)


def _holds_only_numbers(space: gymnasium.Space) -> bool:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, Mapping) else space.spaces
        return all(map(_holds_only_numbers, parts))
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
