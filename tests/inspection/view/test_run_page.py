"""How a run trained, in headless Chromium: curves, alarms, settings and several runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from inspection.view.build import Book, write_once
from tests.fixtures.browser import Browser
from tests.fixtures.played_episodes import invented_episode, write_run
from tests.inspection.view.pages import HOSTILE, choose, view_options, write_rows

pytestmark = pytest.mark.usefixtures("usual_window")


def collapsing(last: int = 30) -> list[dict[str, Any]]:
    """A run whose KL leaves its range in update 16, and whose held-out success falls after update
    10."""
    rows = []
    for k in range(1, last + 1):
        row = {"update": k, "turns": 64.0 * k, "turn/reward": 0.01 * k, "train/actor_trains": 1.0}
        row |= {"actor/ref_kl": 0.1 if k < 16 else 2.9, "actor/entropy": 0.2 if k < 16 else 1.4}
        row |= {
            "rollout/turns": 64.0,
            "rollout/engine_busy_share": 0.97,
            "rollout/env_busy_share": 0.2,
        }
        rows.append(
            row | {"rollout/engine_concurrency": 8.0, "perf/rollout_s": 1.0, "perf/train_s": 3.0}
        )
    wins = {0: 0.4, 10: 0.9, 20: 0.2, 30: 0.1}
    return rows + [
        {"update": k, "eval/success": x, "eval/episodes": 100.0}
        for k, x in wins.items()
        if k <= last
    ]


def show(browser: Browser, run: Path) -> None:
    write_once(view_options(run))
    browser.open(run / "episodes.html")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("collapsed")
    write_rows(run, collapsing(), keys={"gamma_step": 0.5}, flags={"num_rollout": 60})
    for update in (0, 10, 20, 30):
        won = update == 10
        episodes = [invented_episode(k, success=won, progression=float(won)) for k in range(3)]
        write_run(run, episodes, setting=f"update {update}")
    write_once(view_options(run))
    return run / "episodes.html"


def test_the_overview_says_when_it_collapsed_and_what_changed(browser: Browser, page: Path) -> None:
    browser.open(page)
    first, second = browser.texts(".alarms li")
    assert (
        "fell from 0.9 at update 10 to 0.2 at update 20" in first and "gamma_step is 0.5" in first
    )
    assert (
        "left its healthy range in update 16" in first and "Entropy went from 0.2 to 1.4" in first
    )
    assert second.startswith("update 20 ")
    assert "30 of 60 updates" in browser.text(".state") and "1,920 turns" in browser.text(".state")
    assert "75 % training" in browser.text(".speed")
    assert browser.text("#strip").startswith("update 30"), "the header does not pool updates"
    assert browser.complaints == []


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"host_busy_share": 0.98}, "rollout process computes 98 %"),
        ({"env_queue_depth": 30.0}, "wait for their environment"),
        ({"env_queue_depth": 3.0, "host_busy_share": 0.5}, "wait for the engine"),
        ({"slots_at_limit": 50.0}, "wait for new weights"),
    ],
)
def test_the_speed_says_where_the_slots_wait_now(
    browser: Browser, tmp_path: Path, load: dict[str, float], said: str
) -> None:
    """Every engine has requests all the time; one was full until it was taken away."""
    told = {f"rollout/{name}": value for name, value in load.items()}
    told |= {
        "rollout/engine_busy_share": 1.0,
        "rollout/engine_concurrency": 8.0,
        "rollout/env_busy_share": 0.2,
    }
    told |= {
        "rollout/turns": 64.0,
        "perf/rollout_s": 3.0,
        "perf/train_s": 1.0,
        "rollout/engine/0/waiting": 0.0,
    }
    rows = [
        {"update": k, **told, **({"rollout/engine/1/waiting": 80.0} if k < 5 else {})}
        for k in range(1, 31)
    ]
    show(browser, write_rows(tmp_path, rows))
    assert said in browser.text(".speed") and "queues" not in browser.text(".speed")


def test_noise_is_no_collapse(browser: Browser, tmp_path: Path) -> None:
    returns = {0: -3.0, 20: 1.0, 40: 0.9, 60: 1.2}
    trained = {"eval/success": 0.0, "train/actor_trains": 1.0}
    write_rows(tmp_path, [{"update": k, "eval/return": x, **trained} for k, x in returns.items()])
    for update, x in returns.items():
        played = [invented_episode(k, success=False, **{"return": x + k - 1}) for k in range(3)]
        write_run(tmp_path, played, setting=f"update {update}")
    show(browser, tmp_path)
    assert "No alarm" in browser.text("#main") and "Held-out return" in browser.text(".chart.wide")


def test_a_stopped_run_shows_its_error_and_its_failed_episodes(
    browser: Browser, tmp_path: Path
) -> None:
    write_rows(tmp_path, [{"update": 0, "eval/success": 0.0, "eval/episodes": 4.0}])
    (tmp_path / "about.json").write_text(json.dumps({"stopped": "12 of 12 episodes failed"}))
    failed = [invented_episode(k, success=False, stop="failed", fault="no room") for k in range(4)]
    write_run(tmp_path, failed, setting="update 0")
    show(browser, tmp_path)
    assert browser.text(".state").startswith("stopped: 12 of 12 episodes failed")
    assert "4 of 4 held-out episodes failed" in browser.text(
        ".alarms"
    ) and "no room" in browser.text(".alarms")
    assert "No alarm" not in browser.text("#main") and "won" not in browser.text("#strip")


def test_a_click_on_a_curve_lists_the_episodes_of_that_update(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.click(".chart.wide .curve")  # its middle is between updates 10 and 20
    browser.wait("document.querySelector('#count').innerText.startsWith('3 of 12')")
    browser.click("#count button")
    browser.evaluate("document.querySelectorAll('.curve')[1].focus()")
    browser.press("ArrowLeft")
    browser.press("Enter")
    browser.wait("location.hash.includes('update=30')")
    before = len(browser.texts(".chart"))
    browser.press("o")
    choose(browser, "#more-curves", "perf/train_s")
    assert len(browser.texts(".chart")) == before + 1


@pytest.mark.parametrize("last", [(20, 20), (40, 16)])
def test_two_runs_are_compared_at_their_last_evaluations(
    browser: Browser, tmp_path: Path, last: tuple[int, int]
) -> None:
    for name, update, won in zip("ab", last, (False, True), strict=True):
        write_rows(tmp_path / name, collapsing(10))
        for setting, wins in ((0, False), (update, won)):
            episodes = [
                invented_episode(k, success=wins, progression=float(wins)) for k in range(3)
            ] * 2
            write_run(tmp_path / name, episodes, setting=f"update {setting}")
    write_once(view_options(tmp_path / "a", tmp_path / "b"))
    browser.open(tmp_path / "a" / "compare.html")
    said = browser.text(".difference")
    assert f"at update {last[0]}" in said and "+100.0 ± 0.0 points" in said
    assert "over 3 pairs" in said, "the repeats of a seed count as one"


def test_hostile_names_and_numbers_are_only_text(browser: Browser, tmp_path: Path) -> None:
    rows = [
        {"update": k, HOSTILE: float(k), "actor/ref_kl": 9.0, "train/actor_trains": 1.0}
        for k in range(1, 8)
    ]
    run = write_rows(
        tmp_path / "<img src=x>", rows, keys={HOSTILE: HOSTILE}, flags={"lr": [HOSTILE]}
    )
    (run / "about.json").write_text(
        json.dumps({"command": HOSTILE, "verdict": {"sentence": HOSTILE}})
    )
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("[]\n")
    show(browser, run)
    browser.evaluate("document.querySelector('.more-settings').open = true")
    shown = browser.text("#main")
    assert (
        "</script><script>" in shown
        and "␛[31mred" in shown
        and "⟨U+202E⟩back" in shown
        and "damaged after 7" in shown
    )
    assert (
        browser.evaluate("document.title") == "<img src=x>"
        and browser.evaluate("document.images.length") == 0
    )
    assert browser.complaints == []


def test_a_followed_run_shows_each_new_update(browser: Browser, tmp_path: Path) -> None:
    run = write_rows(tmp_path, collapsing(10))
    for last in (10, 20):
        write_rows(tmp_path, collapsing(last))
        Book(view_options(run)).write(run / "episodes.html", follow=0.5)
        if last == 10:
            browser.open(run / "episodes.html")
        browser.wait(f"document.querySelector('.state')?.innerText.includes('{last} updates')")


REWARD = "[...document.querySelectorAll('.chart')].find((c) => c.innerText.startsWith('Reward per turn'))"


def test_the_seeds_of_a_variant_are_drawn_together_or_apart_and_smoothed(
    browser: Browser, tmp_path: Path
) -> None:
    for variant in (0, 1):
        for seed in range(3):
            rows = [
                {"update": k, "turn/reward": variant + (k % 2) + 0.1 * seed} for k in range(1, 41)
            ]
            write_rows(
                tmp_path / f"v{variant}" / f"seed_{seed}",
                rows,
                keys={"gamma_step": 0.5 + 0.01 * variant},
            )
    show(browser, tmp_path)
    lines = f"{REWARD}.querySelectorAll('.series:not(.faint)').length"
    assert browser.evaluate(lines) == 2
    value = f"{REWARD}.querySelector('svg').getAttribute('aria-label')"
    assert "v0 (3 seeds): 1.10 at update 1, 0.1 at update 40" in browser.evaluate(value)
    choose(browser, "#smooth", "10")
    assert "v0 (3 seeds): 1.10 at update 1, 0.6 at update 40" in browser.evaluate(value)
    browser.click("#group-seeds")
    assert browser.evaluate(lines) == 6 and "v0/seed_2" in browser.evaluate(value)
