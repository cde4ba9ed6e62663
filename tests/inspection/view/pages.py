"""Runs and pages for the tests of the viewer, and what is done on a page more than once."""

import base64
import gzip
import json
import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from inspection.view import add_arguments
from inspection.view.build import write_once
from tests.fixtures.browser import Browser
from tests.fixtures.played_episodes import write_run

CURRENT = ".turn-row.current"
HOSTILE = (
    "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = "
    "'owned'\"> ${1} {{2}} <!-- \x00\x1b[31mred\x1b[0m \u202eback\u202c \u200b 日本語 😀 é"
)


def view_options(*runs: Path, **changes: Any) -> Namespace:
    """The defaults for these runs, with some changed."""
    parser = ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([str(run) for run in runs])
    return Namespace(**{**vars(options), **changes})


def write_page(folder: Path, episodes: list[dict[str, Any]], *names: str) -> Path:
    """Write episodes, with player and setting in `names`, and their page; return the page."""
    write_once(view_options(write_run(folder, episodes, *names)))
    return folder / "episodes.html"


def write_rows(run: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    """Write metrics as `slime-verlog train` does, and its settings if some are given."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings:
        (run / "settings.json").write_text(json.dumps(settings))
    return run


def blocks(page: Path) -> dict[str, list[Any]]:
    """The page's data: block names with their JSON lines."""
    found = re.findall(
        r'<script type="application/octet-stream" id="([\w-]+)">([^<]*)</script>', page.read_text()
    )
    unpack = lambda text: gzip.decompress(base64.b64decode(text)).decode()
    return {name: [json.loads(line) for line in unpack(text).split("\n")] for name, text in found}


def head_of(page: Path) -> dict[str, Any]:
    return blocks(page)["head"][0]


def choose(browser: Browser, box: str, value: str) -> None:
    """Choose an option of a list as a person does."""
    browser.evaluate(f"document.querySelector('{box}').value = '{value}'")
    browser.evaluate(f"document.querySelector('{box}').dispatchEvent(new Event('change'))")


def open_turn(browser: Browser, page: Path, anchor: str) -> None:
    """Open the page at a turn and wait until its text is there."""
    browser.open(page, anchor)
    browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
