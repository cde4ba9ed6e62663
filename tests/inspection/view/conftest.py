"""The browser in which pages are looked at."""

from collections.abc import Iterator

import pytest

from tests.fixtures.browser import Browser, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def usual_window(browser: Browser) -> None:
    browser.resize(1400, 900)
    browser.prefer("light")
