"""Whether a policy with a window still reads the fact in Recall's first turn, and whether later turns repeat it.

    python -m embedded.studies.run recall --variants window_400 --keep-policies
    slime-verlog evaluate RUN/run.yaml --player RUN/policy_after --episodes 64 --set eval.max_turns=12 --out FOLDER
    python -m benchmarks.first_turns FOLDER [FOLDER ...] > first_turns.csv

RUN is the folder of one seed. The run's `env.max_steps` must stay, because the prompt names it.
`first` is the share of first turns whose response names the light's colour and no other. `later` is the share of later
turns that name the colour of the turn before, among those after a turn that names one.
"""

import re
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from envs.recall import COLOURS
from inspection.records import FILE, read_episodes

_COLOUR = re.compile("|".join(COLOURS))


def shares(episode: Mapping[str, Any]) -> tuple[bool, list[bool]]:
    """Return whether the first turn names its light's colour, and whether each later turn repeats the one before."""
    shown = episode["messages"][episode["story"][0]["prompt"][-1]]["content"]
    named = [set(_COLOUR.findall(turn["response"])) for turn in episode["story"]]
    light = re.search(r"The first light is (\w+)", shown)
    assert light is not None, "an episode of Recall begins with a light"
    later = [now == before for before, now in pairwise(named) if len(before) == 1]
    return named[0] == {light[1]}, later


def main() -> None:
    """Print a row for each folder of an evaluation."""
    print("folder,episodes,first,later")
    for folder in map(Path, sys.argv[1:]):
        found = [shares(episode) for episode in read_episodes(folder / FILE)]
        later = [turn for _, turns in found for turn in turns]
        first = sum(right for right, _ in found) / len(found)
        print(f"{folder.parent.name}/{folder.name},{len(found)},{first:.3f},{sum(later) / max(len(later), 1):.3f}")


if __name__ == "__main__":
    main()
