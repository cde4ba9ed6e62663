"""Time and size of the episode viewer's page for many long episodes, opened in headless Chromium.

    python benchmarks/viewer.py [--episodes 3000] [--turns 50] [--worlds 200]

The episodes are Crafter's and BabyAI's texts, varied so that no two are alike, with answers of about 100 random words,
which compress worse than real ones. Times are wall times, with everything else on the machine running.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from inspection.view.build import write_once  # noqa: E402
from tests.fixtures.browser import Browser, chromium  # noqa: E402
from tests.fixtures.played_episodes import record_episode  # noqa: E402
from tests.inspection.view.options import view_options  # noqa: E402

_SOURCES = (("envs.crafter", "default", {}), ("envs.babyai", "GoToImpUnlock", {"max_steps": 400}))
_DIFFERENT = 12
"""Episodes really played per environment."""


def write_episodes(path: Path, episodes: int, turns: int) -> int:
    """Write the file; return its number of turns."""
    played = [
        record_episode(env, task, seed, options=options, skill=0.3, max_turns=turns)
        for env, task, options in _SOURCES
        for seed in range(_DIFFERENT)
    ]
    draw, total = random.Random(0), 0
    words = [word for episode in played for turn in episode["story"] for word in turn["response"].split()]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(episodes):
            episode = vary(played[number % len(played)], number, draw, words)
            total += len(episode["story"])
            file.write(json.dumps({"setting": "-", "player": "policy", **episode}) + "\n")
    return total


def vary(episode: dict[str, Any], number: int, draw: random.Random, words: Sequence[str]) -> dict[str, Any]:
    """The episode as another one, except for the first of each kind, whose worlds can be replayed."""
    episode = copy.deepcopy(episode)
    if number < len(_SOURCES) * _DIFFERENT:
        return episode
    episode |= {"seed": 10**9 + number, "success": draw.random() < 0.5, "return": draw.random()}
    for message in episode["messages"][1:]:
        line = f"\n- {draw.choice(words)} {draw.randrange(9)} steps {draw.choice(words)}\n"
        message["content"] = message["content"].replace("\n", line, 1)
    for turn in episode["story"]:
        thought = " ".join(draw.choice(words) for _ in range(100))
        turn["response"] = f"THINK: {thought}\nACTION: {turn['executed_action']}"
    return episode


def measure_page(browser: Browser, page: Path, episodes: int) -> list[tuple[str, float]]:
    """Seconds until the list shows, until episodes show, and of searches."""
    rows = []
    for attempt in ("first", "second"):
        browser.call("Page.navigate", url="about:blank")
        rows.append((f"open the page, {attempt} time", timed(lambda: browser.open(page))))
    for number in (episodes // 2, episodes, 7):
        browser.evaluate(f"location.hash = '#episode={number}&turn=20'")
        shown = f"document.querySelector('.episode-head')?.innerText.includes('#{number}')"
        rows.append((f"show episode {number}", timed(lambda shown=shown: browser.wait(shown))))
    for words in ("no such words", "furnace"):
        browser.evaluate(f"location.hash = '#q={words.replace(' ', '+')}'")
        done = "!document.querySelector('#count').innerText.includes('searched')"
        rows.append((f"search for {words!r}", timed(lambda done=done: browser.wait(done, 60))))
    return rows


def timed(act: Any) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print one line per number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--worlds", type=int, default=24)
    given: Namespace = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        run = Path(folder)
        turns = write_episodes(run / "episodes.jsonl", given.episodes, given.turns)
        cpu = time.process_time()
        seconds = timed(lambda: write_once(view_options(run, worlds=given.worlds)))
        page, record = run / "episodes.html", run / "episodes.jsonl"
        print(f"{given.episodes} episodes, {turns} turns, {record.stat().st_size / 1e6:.0f} MB of records")
        print(f"build {seconds:.1f} s (CPU {time.process_time() - cpu:.1f} s), page {page.stat().st_size / 1e6:.1f} MB")
        browser.resize(1440, 900)
        for name, value in measure_page(browser, page, given.episodes):
            print(f"{name}: {value:.2f} s")


if __name__ == "__main__":
    main()
