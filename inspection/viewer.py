"""Writes episodes as one self-contained HTML page, which needs no server.

python -m inspection.viewer outputs/evaluation/episodes.jsonl [--out episodes.html] [--most 200]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from slime_verlog import ConfigError, command

TEMPLATE = Path(__file__).with_name("viewer.j2")


def read_episodes(path: Path, most: int) -> list[dict[str, Any]]:
    """The first `most` episodes of a JSON-lines file.

    Raises:
        ConfigError: the file cannot be read, or a line is not an episode.
    """
    episodes: list[dict[str, Any]] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(episodes) == most:
                    break
                try:
                    episode = json.loads(line)
                    list(episode["story"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"{path}, line {number}, is not an episode: {error!r}") from error
                episodes.append(episode)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return episodes


def render(episodes: Sequence[dict[str, Any]], title: str) -> str:
    """The HTML page, with every text of the model and the environment escaped."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(episodes=episodes, title=title)


@command()
def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page beside the file of episodes, or to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episodes", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the input")
    parser.add_argument("--most", type=int, default=200, help="episodes on the page")
    options = parser.parse_args(arguments)
    out = options.out or options.episodes.with_suffix(".html")
    out.write_text(render(read_episodes(options.episodes, options.most), options.episodes.name), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
