"""The documentation site: it builds without warnings, and its links lead to the lines that the
pages name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.conftest import REPO

pytest.importorskip("mkdocs", reason="needs pip install -e '.[docs]'")
pytestmark = pytest.mark.slow

REPOSITORY_URL = "https://github.com/somebody/slime-verlog"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as a reader builds it; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPO,
        env={**os.environ, "REPOSITORY_URL": REPOSITORY_URL},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_function_of_a_page_links_to_its_line(site: Path) -> None:
    links = 0
    for page in ("formulas", "reliability", "reliability_sandbox", "algorithms"):
        html = (site / f"{page}.html").read_text(encoding="utf-8").replace("<wbr>", "")
        for path, line, name in re.findall(
            r'<a href="source/([\w./]+\.py)\.html#__codelineno-0-(\d+)"><code>[\w./]+::(\w+)</code>',
            html,
        ):
            source = (REPO / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
            assert re.match(rf"\s*(async )?(def|class) {name}\b", source), (page, path, line, name)
            assert f'id="__codelineno-0-{line}"' in (site / "source" / f"{path}.html").read_text(
                encoding="utf-8"
            )
            links += 1
    assert links > 150


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    for name in ("index", "tutorial", "reference/api", "run_page"):
        html = (site / f"{name}.html").read_text(encoding="utf-8")
        assert not re.findall(
            r'(?:src|srcset|<link rel="(?:stylesheet|preload)" href)="(https?://[^"]*)"', html
        )
