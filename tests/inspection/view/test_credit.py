"""The account of a token in headless Chromium: what made its advantage, and where such tokens are
found."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.browser import Browser
from tests.fixtures.played_episodes import invented_episode, write_run
from tests.inspection.view.pages import CURRENT, write_page

pytestmark = pytest.mark.usefixtures("usual_window")


def credited(turns: int = 3, notes: int | None = None, own: float | None = None) -> dict[str, Any]:
    """A training episode of two tokens per turn with known values; its advantages are dual-discount
    GAE's.

    In turn `notes`, the model wrote its notes. `own` is the lambda of each turn, as with
    `lambda_policy`.
    """
    credit = {
        "role": "actor",
        "form": "dual",
        "kl_coef": 0.1,
        "gamma_step": 0.9,
        "lambda_step": 0.8,
    }
    credit |= {"gamma_token": 1.0, "lambda_token": 0.5, "next_value": None}
    episode = invented_episode(
        turns=turns, player="training", credit=credit, seed="episode 4, turns 1–3"
    )
    values = [[0.1 * k, 0.2 * k + 0.05] for k in range(turns)]
    kls = [[0.01, 0.02]] * turns
    following = 0.0
    advantage = 0.0
    for k in reversed(range(turns)):
        story = episode["story"][k]
        row = []
        for j in (1, 0):
            gamma, decay = (
                (0.9, 0.9 * 0.8) if j and k != notes else (1.0, 0.5 if own is None else own)
            )
            delta = (
                -0.1 * kls[k][j]
                + (story["reward"] if j else 0.0)
                + gamma * following
                - values[k][j]
            )
            advantage, following = delta + decay * advantage, values[k][j]
            row.insert(0, advantage + values[k][j])
        story["tokens"] = {
            "text": ["go", " left"],
            "values": values[k],
            "returns": row,
            "kl": kls[k],
            "advantages": [1, -1],
        }
        if own is not None:
            story["lambda_token"] = own
    if notes is not None:
        episode["story"][notes]["moves"] = False
    return episode


@pytest.mark.parametrize("changes", [{}, {"notes": 1}, {"own": 0.25}, {"own": 0.0}])
def test_a_token_shows_what_made_its_advantage(
    browser: Browser, tmp_path: Path, changes: dict[str, Any]
) -> None:
    episode = credited(**changes)
    browser.open(write_page(tmp_path, [episode], "training", "update 2"), "#episode=1&turn=1")
    browser.wait(f"document.querySelector('{CURRENT} .token') && true")
    assert browser.evaluate("document.querySelector('#colour').value") == "advantages", (
        "tokens are coloured at once"
    )
    browser.click(f"{CURRENT} .token")
    rows = dict(row.rsplit("\t", 1) for row in browser.texts(".credit tr"))
    tokens = episode["story"][0]["tokens"]
    assert float(rows["= advantage"].replace("−", "-")) == pytest.approx(
        tokens["returns"][0] - tokens["values"][0], abs=1e-4
    )
    if changes.get("own") != 0:
        assert {"from turn 2", "from turn 3", "from later tokens of this turn"} <= set(rows)
    assert "something of this batch" not in browser.text("#credit")
    assert browser.evaluate("document.querySelectorAll('.credit-strip rect').length") == 4
    browser.press("ArrowRight")
    assert "reward of the turn" in browser.text(".credit")


def test_the_sample_of_training_has_no_win_rate_and_held_out_episodes_point_to_it(
    browser: Browser, tmp_path: Path
) -> None:
    write_run(tmp_path, [{**credited(), "success": True}], "training", "update 2")
    page = write_page(tmp_path, [invented_episode(success=True)], "policy", "update 2")
    browser.open(page, "#episode=2&turn=1")
    browser.wait("document.querySelector('#stage .link') && true")
    assert "the sample of training" in browser.text("#stage") and "100.0" in browser.text("#strip")
    browser.click("#stage .link")
    browser.wait("document.querySelector('#strip').innerText.includes('a sample of training')")
    assert "won" not in browser.text("#strip")
    assert browser.evaluate("location.hash").startswith("#episode=1"), "its first episode is open"


def test_without_discounts_or_values_the_account_says_so(browser: Browser, tmp_path: Path) -> None:
    bare = credited()
    single = credited()
    del bare["credit"]
    for turn in single["story"]:
        del turn["tokens"]["values"]
    page = write_page(tmp_path, [bare, single], "training", "update 2")
    for number, sentence in ((1, "does not hold the discounts"), (2, "no critic's value")):
        browser.open(page, f"#episode={number}")
        browser.wait(f"document.querySelector('{CURRENT} .token') && true")
        browser.click(f"{CURRENT} .token")
        assert sentence in browser.text("#credit")
