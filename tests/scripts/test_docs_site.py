"""The documentation site: it builds without warnings, and its links lead to the lines that the pages name."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.fixtures.browser import Browser, chromium
from tests.scripts.conftest import REPO

pytest.importorskip("mkdocs", reason="needs pip install -e '.[docs]'")

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def show(browser: Browser, page: Path) -> None:
    """Open a page of the site from its folder, without a server."""
    browser.complaints.clear()
    browser.call("Page.navigate", url=page.as_uri())
    loaded = "document.readyState === 'complete' && document.documentElement.classList.contains('js')"
    browser.wait(f"location.pathname.endsWith('/{page.name}') && {loaded}")


def test_every_function_of_a_page_links_to_its_line(site: Path) -> None:
    links = 0
    for page in ("formulas", "reliability", "algorithms"):
        html = (site / f"{page}.html").read_text(encoding="utf-8").replace("<wbr>", "")
        for path, line, name in re.findall(
            r'<a href="source/([\w./]+\.py)\.html#__codelineno-0-(\d+)"><code>[\w./]+::(\w+)</code>', html
        ):
            source = (REPO / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
            assert re.match(rf"\s*(async )?(def|class) {name}\b", source), (page, path, line, name)
            assert f'id="__codelineno-0-{line}"' in (site / "source" / f"{path}.html").read_text(encoding="utf-8")
            links += 1
    assert links > 150


def test_every_link_within_the_site_leads_to_a_file_and_an_anchor(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: set(re.findall(r'\sid="?([^"\s>]+)', html)) for page, html in pages.items()}
    dead, links = [], 0
    for page, html in pages.items():
        tags = " ".join(re.findall(r"<\w[^>]*\s(?:href|src|srcset)=[^>]*>", html))
        for link in set(re.findall(r'\s(?:href|src|srcset)="?([^"\s>]+)', tags)):
            if re.match(r"\w+:|//", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            links += 1
            if not target.is_file() or anchor not in {"", *anchors.get(target, ())}:
                dead.append(f"{page.relative_to(site)}: {link}")
    assert not dead, dead
    assert links > 1000


def test_the_header_links_to_the_repository_and_asks_its_host_nothing(site: Path) -> None:
    html = (site / "index.html").read_text(encoding="utf-8")
    assert f'href="{REPOSITORY_URL}"' in html and 'data-md-component="source"' not in html


def test_the_animation_is_small_and_loads_and_runs_nothing(site: Path) -> None:
    text = (site / "images" / "episode.svg").read_text(encoding="utf-8")
    assert 10_000 < len(text) < 200_000 and "prefers-reduced-motion: reduce" in text
    assert not re.search(r"<script|href=|url\(|<foreignObject|\son\w+=", text)


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    for name in ("index", "tutorial", "reference/api", "run_page"):
        html = (site / f"{name}.html").read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|srcset|<link rel="(?:stylesheet|preload)" href)="(https?://[^"]*)"', html)


def test_examples_are_shown_and_shipped(site: Path) -> None:
    shown = re.sub(r"<[^>]+>", "", (site / "tutorial.html").read_text(encoding="utf-8"))
    assert "class Treasure(TextGame):" in shown and "custom_configs/treasure.yaml" in shown
    assert (site / "examples" / "treasure.py").read_text() == (REPO / "docs" / "examples" / "treasure.py").read_text()


def test_the_page_about_commands_lists_every_part(site: Path) -> None:
    from inspection.command import PARTS

    html = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert not [name for name in PARTS if f'id="{name}"' not in html]


@pytest.mark.parametrize("page", ["index", "tutorial", "reference/configuration"])
def test_pages_fit_a_phone(site: Path, browser: Browser, page: str) -> None:
    browser.resize(390, 844)
    show(browser, site / f"{page}.html")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390 and not browser.complaints


def test_the_search_works_without_a_server(site: Path, browser: Browser) -> None:
    browser.resize(1280, 800)
    show(browser, site / "reference" / "commands.html")
    browser.click(".md-search__input")
    browser.type("dual discount")
    # The page's script may start to listen after the last letter, so the key is let go until there is a result.
    released = "document.querySelector('.md-search__input').dispatchEvent(new Event('keyup'))"
    first = browser.wait(f"{released} && document.querySelector('.md-search-result__link')?.href")
    assert first.startswith(site.as_uri()) and not browser.complaints


def test_the_colors_follow_the_system(site: Path, browser: Browser) -> None:
    shades = []
    for theme in ("light", "dark"):
        browser.prefer(theme)
        show(browser, site / "index.html")
        shades.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert shades == ["rgb(255, 255, 255)", "rgb(15, 22, 29)"]


def test_readers_who_want_less_motion_see_the_end_of_the_animation(site: Path, browser: Browser) -> None:
    """The page runs its animations by CSS, so that the picture shown without them is the last one."""
    picture = site / "images" / "episode.svg"
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.call("Emulation.setEmulatedMedia", features=features)
    browser.call("Page.navigate", url=picture.as_uri())
    browser.wait("document.documentElement.tagName === 'svg' && document.readyState === 'complete'")
    shown = "[...document.querySelectorAll('text')].filter((e) => getComputedStyle(e.parentNode).opacity === '1')"
    text = browser.evaluate(f"{shown}.map((e) => e.textContent).join(' | ')")
    assert not browser.evaluate("document.getAnimations().length")
    assert "after PPO" in text and "before PPO" not in text and "reward +1" in text
