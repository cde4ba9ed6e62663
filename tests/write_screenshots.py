"""Writes the pictures of the run page in docs/images, from a finished run of the quickstart.

python -m tests.write_screenshots outputs/quickstart      needs Chromium, and runs from the repository's root
"""

import json
import sys
from pathlib import Path

from inspection.command import main
from tests.fixtures.browser import chromium
from tests.write_animation import choose

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TOKEN = ".turn-row.current .token:nth-child(3)"


def write_screenshots(run: Path) -> None:
    """Write the run's page, and pictures of its overview, the animation's episode, and a rewarded training episode."""
    try:
        main(["view", str(run), "--worlds", "2000"])
    except SystemExit as end:
        if end.code:
            raise
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = 1 + episodes.index(choose(run)[1])
    lines = (run / "training.jsonl").read_text(encoding="utf-8").splitlines()
    rewarded = [place for place, line in enumerate(lines, 1) if json.loads(line)["return"] > 0]
    with chromium() as browser:
        browser.resize(1320, 860)
        for theme in ("light", "dark"):
            browser.prefer(theme)
            browser.open(run / "episodes.html")
            browser.screenshot(IMAGES / f"run_{theme}.png")
            browser.open(run / "episodes.html", f"#episode={shown}&turn=4")
            browser.wait("document.querySelector('.world')?.width > 100")
            browser.screenshot(IMAGES / f"viewer_{theme}.png")
        browser.prefer("light")
        browser.open(run / "episodes.html", f"#episode={len(episodes) + rewarded[-1]}&turn=2")
        browser.wait(f"document.querySelector('{TOKEN}') && true")
        browser.click(TOKEN)
        browser.screenshot(IMAGES / "credit.png")


if __name__ == "__main__":
    write_screenshots(Path(sys.argv[1]))
