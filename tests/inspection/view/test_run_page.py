"""How a run trained, in headless Chromium: curves, alarms, settings and several runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from embedded.run.ending import describe, win_rate
from inspection.view.build import Book, write_once
from tests.fixtures.browser import Browser
from tests.fixtures.played_episodes import invented_episode, write_run
from tests.inspection.view.options import view_options
from tests.inspection.view.test_page import CURRENT, HOSTILE
from tests.inspection.view.test_training import write_rows

pytestmark = pytest.mark.usefixtures("usual_window")


def collapsing(last: int = 30) -> list[dict[str, Any]]:
    """A run whose KL leaves its range in update 16, and whose held-out success falls after update 10."""
    rows = [
        {"update": k, "turns": 64.0 * k, "seconds": 3.0 * k, "turn/reward": 0.01 * k, "train/actor_trains": 1.0}
        | {"actor/ref_kl": 0.1 if k < 16 else 2.9, "actor/entropy": 0.2 if k < 16 else 1.4, "rollout/turns": 64.0}
        | {"rollout/engine_busy_share": 0.97, "rollout/engine_concurrency": 8.0, "rollout/env_busy_share": 0.2}
        | {"rollout/engine/0/waiting": 1.5, "rollout/engine/1/waiting": 2.5, "rollout/engine/1/running": 4.0}
        | {"perf/rollout_s": 1.0, "perf/train_s": 3.0}
        for k in range(1, last + 1)
    ]
    wins = {0: 0.4, 10: 0.9, 20: 0.2, 30: 0.1}
    return rows + [{"update": k, "eval/success": x, "eval/episodes": 100.0} for k, x in wins.items() if k <= last]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("collapsed")
    write_rows(run, collapsing(), keys={"gamma_step": 0.5}, flags={"num_rollout": 60})
    for update in (0, 10, 20, 30):
        write_run(
            run,
            [invented_episode(k, success=update == 10, progression=float(update == 10)) for k in range(3)],
            setting=f"update {update}",
        )
    write_once(view_options(run))
    return run / "episodes.html"


def test_the_overview_says_when_it_collapsed_and_what_changed(browser: Browser, page: Path) -> None:
    browser.open(page)
    first, second = browser.texts(".alarms li")
    assert "fell from 0.9 at update 10 to 0.2 at update 20" in first
    assert first.endswith("Settings: gamma_step is 0.5, by default 0.99.")
    assert browser.evaluate("document.querySelector('.more-settings').open"), "what was set is shown then"
    assert (
        "KL to the first policy left its healthy range in update 16" in first
        and "Entropy went from 0.2 to 1.4" in first
    )
    assert second.startswith("update 20 the KL to the policy before PPO")
    assert "30 of 60 updates" in browser.text(".state") and "1,920 turns" in browser.text(".state")
    assert "Training is the bottleneck." in browser.text(".speed") and "75 % training" in browser.text(".speed")
    assert "4 requests wait in the engines' queues" in browser.text(".speed")
    assert "gamma_step" in browser.evaluate("document.querySelector('.settings').textContent")
    assert browser.complaints == []


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"host_busy_share": 0.98}, "A rollout process computes 98 % of the time, so it is the bottleneck."),
        ({"env_queue_depth": 30.0}, "Most turns wait for their environment."),
        ({"env_queue_depth": 3.0, "host_busy_share": 0.5}, "Most turns wait for the engine."),
        ({"slots_at_limit": 50.0}, "Most slots wait for new weights."),
    ],
)
def test_the_speed_says_where_the_slots_wait_now(
    browser: Browser, tmp_path: Path, load: dict[str, float], said: str
) -> None:
    """Every engine has requests all the time; one was full until it was taken away."""
    told = {f"rollout/{name}": value for name, value in load.items()}
    told |= {"rollout/engine_busy_share": 1.0, "rollout/engine_concurrency": 8.0, "rollout/env_busy_share": 0.2}
    rows = [
        {
            "update": k,
            "rollout/turns": 64.0,
            "perf/rollout_s": 3.0,
            "perf/train_s": 1.0,
            "rollout/engine/0/waiting": 0.0,
        }
        | told
        | ({"rollout/engine/1/waiting": 80.0} if k < 5 else {})
        for k in range(1, 31)
    ]
    write_run(write_rows(tmp_path, rows), [invented_episode(1)])
    write_once(view_options(tmp_path))
    browser.open(tmp_path / "episodes.html")
    assert browser.text(".speed").endswith(said) and "queues" not in browser.text(".speed")


def test_noise_is_no_collapse(browser: Browser, tmp_path: Path) -> None:
    returns = {0: -3.0, 20: 1.0, 40: 0.9, 60: 1.2}
    trained = {"eval/success": 0.0, "train/actor_trains": 1.0}
    write_rows(tmp_path, [{"update": k, "eval/return": x, **trained} for k, x in returns.items()])
    for update, x in returns.items():
        played = [invented_episode(k, success=False, **{"return": x + k - 1}) for k in range(3)]
        write_run(tmp_path, played, setting=f"update {update}")
    write_once(view_options(tmp_path))
    browser.open(tmp_path / "episodes.html")
    assert "No alarm" in browser.text("#main") and "Held-out return" in browser.text(".chart.wide")
    assert browser.evaluate("document.querySelectorAll('.chart.wide .error').length") == 4


def test_a_stopped_run_shows_its_error_and_its_failed_episodes_and_no_green_line(
    browser: Browser, tmp_path: Path
) -> None:
    write_rows(tmp_path, [{"update": 0, "eval/success": 0.0, "eval/episodes": 4.0}])
    (tmp_path / "about.json").write_text(json.dumps({"stopped": "12 of 12 episodes failed; read the first"}))
    failed = [invented_episode(k, success=False, progression=0.0, stop="failed", fault="no room") for k in range(4)]
    write_run(tmp_path, failed, setting="update 0")
    write_once(view_options(tmp_path))
    browser.open(tmp_path / "episodes.html")
    assert browser.text(".state").startswith("stopped: 12 of 12 episodes failed; read the first")
    assert "4 of 4 held-out episodes failed and count as 0; the first: no room" in browser.text(".alarms")
    assert "No alarm" not in browser.text("#main") and "won" not in browser.text("#strip")
    assert "4 of 4 episodes failed" in browser.text("#strip") and browser.complaints == []


def test_a_win_rate_has_one_standard_error_and_bars_within_0_and_1(browser: Browser, tmp_path: Path) -> None:
    write_rows(tmp_path, [{"update": 20, "eval/success": 0.875, "eval/episodes": 8.0, "train/actor_trains": 1.0}])
    write_run(tmp_path, [invented_episode(k, success=k > 0) for k in range(8)], setting="update 20")
    write_once(view_options(tmp_path))
    browser.open(tmp_path / "episodes.html")
    rate = win_rate([{"success": k > 0} for k in range(8)])
    assert describe(rate).startswith("win rate 0.875 ± 0.117")
    assert "87.5 ± 11.7 % won" in browser.text("#strip") and "87.5 ± 11.7 %" in browser.text(".summary .win")
    assert browser.text(".chart.wide .value") == "0.875 ± 0.117"
    top, bottom = browser.evaluate("document.querySelector('.error').getAttribute('d')").split(" ")[1].split("V")
    middle = browser.evaluate("Number(document.querySelector('.dot-in').getAttribute('cy'))")
    low, high = sorted(abs(float(end) - middle) for end in (top, bottom))
    assert high / low == pytest.approx(2 * 0.11693 / 0.125, abs=0.01), "the upper bar ends at 1"


def test_two_runs_without_a_common_seed_are_not_paired(browser: Browser, tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [invented_episode(k) for k in (1, 2, 3)])
    b = write_run(write_rows(tmp_path / "b", collapsing(10)), [invented_episode(k) for k in (7, 8)])
    (b / "about.json").write_text(json.dumps({"verdict": {"sentence": "improved"}}))
    write_once(view_options(a, b))
    browser.open(a / "compare.html")
    assert "No task and seed in common, so no episodes are paired." in browser.text("#main")
    assert browser.text("#count").startswith("5 episodes")
    assert browser.text(".state").startswith("B") and browser.text(".chart.wide .legend") == "b"
    assert browser.evaluate("document.querySelectorAll('.chart.wide .series-1, .chart.wide .key-1').length") == 2


def test_the_header_does_not_pool_updates(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.text("#strip").replace("\n", " ").startswith("update 30 3 episodes 0.0")


def test_a_click_on_a_curve_lists_the_episodes_of_that_update(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.click(".chart.wide .curve")  # its middle is between updates 10 and 20
    browser.wait("document.querySelector('#count').innerText.startsWith('3 of 12')")
    assert "update=10" in browser.evaluate("location.hash") or "update=20" in browser.evaluate("location.hash")
    browser.click("#count button")
    browser.evaluate("document.querySelectorAll('.curve')[1].focus()")
    browser.press("ArrowLeft")
    assert "update 30" in browser.text("#live")
    browser.press("Enter")
    browser.wait("location.hash.includes('update=30')")


def test_any_metric_can_be_plotted(browser: Browser, page: Path) -> None:
    browser.open(page)
    before = len(browser.texts(".chart"))
    browser.evaluate("document.querySelector('#more-curves').value = 'perf/train_s'")
    browser.evaluate("document.querySelector('#more-curves').dispatchEvent(new Event('change'))")
    assert len(browser.texts(".chart")) == before + 1


def test_several_runs_share_axes_and_show_where_their_settings_differ(browser: Browser, tmp_path: Path) -> None:
    for k, name in enumerate("abc"):
        write_rows(tmp_path / name, collapsing(10 + 10 * k), keys={"n_env": 8 + k, "max_turns": 5}, flags={})
    write_once(view_options(tmp_path))
    browser.open(tmp_path / "episodes.html")
    assert len(browser.texts(".runs tbody tr")) == 3
    assert browser.evaluate("document.querySelectorAll('.chart.wide .series').length") == 3
    settings = browser.texts(".settings tbody tr")
    assert len(settings) == 1 and settings[0].split() == ["n_env", "8", "9", "10"]
    assert browser.complaints == []


def test_a_comparison_opens_where_only_one_won_and_marks_the_first_difference(browser: Browser, tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [invented_episode(k, success=k == 2) for k in (1, 2, 3)])
    other = invented_episode(3)
    other["story"][1] |= {"executed_action": "right", "response": "ACTION: right"}
    b = write_run(tmp_path / "b", [invented_episode(1), invented_episode(2), other])
    write_once(view_options(a, b))
    browser.open(a / "compare.html")
    assert "seed 2" in browser.texts(".row")[2], "both won: last"
    browser.open(a / "compare.html", "#episode=3")
    browser.wait("document.querySelector('#divergence') && true")
    browser.click("#divergence")
    browser.wait(f"document.querySelector('{CURRENT} h3')?.innerText === 'Turn 2'")
    assert browser.evaluate(f"document.querySelector('{CURRENT}').classList.contains('parting')")


def test_a_comparison_of_two_runs_is_about_their_last_update(browser: Browser, tmp_path: Path) -> None:
    for name, last in (("a", 0), ("b", 1)):
        for update, wins in ((0, 0), (20, last)):
            episodes = [invented_episode(k, success=bool(wins), progression=float(wins)) for k in range(3)]
            write_run(tmp_path / name, episodes, setting=f"update {update}")
        write_rows(tmp_path / name, collapsing(10))
    write_once(view_options(tmp_path / "a", tmp_path / "b"))
    browser.open(tmp_path / "a" / "compare.html")
    assert "Win rate at update 20, B − A: +100.0 ± 0.0 points (standard error), over 3 pairs" in browser.text(
        ".difference"
    )
    assert browser.text(".difference").endswith("only B won 3, only A 0")
    assert browser.text(".runs").count("10 updates") == 2 and browser.complaints == []


def test_the_repeats_of_a_seed_count_as_one_in_standard_errors(browser: Browser, tmp_path: Path) -> None:
    for name, always in (("a", 5), ("b", 7)):
        episodes = [invented_episode(k, success=k < always, **{"return": float(k < always)}) for k in range(10)] * 4
        write_run(tmp_path / name, episodes)
    write_once(view_options(tmp_path / "a", tmp_path / "b"))
    browser.open(tmp_path / "a" / "compare.html")
    assert "50.0 ± 16.7 % won" in browser.text("#strip") and "0.50 ± 0.17" in browser.text(".summary")
    said = browser.text(".difference")
    assert "+20.0 ± 13.3 points (standard error), over 10 pairs" in said
    assert said.endswith("B won more often 2, A 0") and browser.complaints == []


def test_runs_that_ended_at_different_updates_are_compared_at_their_last_evaluations(
    browser: Browser, tmp_path: Path
) -> None:
    for name, last, won in (("a", 40, True), ("b", 16, False)):
        for update in (0, last):
            episodes = [invented_episode(k, success=won and update > 0, progression=1.0 * won) for k in range(3)]
            write_run(tmp_path / name, episodes, setting=f"update {update}")
        write_rows(tmp_path / name, collapsing(10))
    write_once(view_options(tmp_path / "a", tmp_path / "b"))
    browser.open(tmp_path / "a" / "compare.html")
    said = browser.text(".difference")
    assert "Win rate at update 40 of A and 16 of B, B − A: −100.0" in said and said.endswith("only B won 0, only A 3")
    assert "update 16" in browser.text("#strip")


def test_part_of_a_goal_is_no_cross_and_a_return_has_no_minus_zero(browser: Browser, tmp_path: Path) -> None:
    episode = invented_episode(
        1_000_000_123, 9, success=False, progression=0.25, stop="time_limit", **{"return": -0.001}
    )
    episode["story"][2] |= {"metrics": {"achievements": 1}, "progression": 0.25}
    write_once(view_options(write_run(tmp_path, [episode])))
    browser.open(tmp_path / "episodes.html", "#episode=1&turn=3")
    browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
    row = browser.text(".row")
    assert "25" in row and "✗" not in row and "return 0.00" in row and "time limit" in row and "…0123" in row
    assert "achievements 1" in browser.text("#numbers") and "progression 25 %" in browser.text("#numbers")
    assert browser.evaluate("document.querySelectorAll('.worlds .curve').length") == 1
    assert "Whole prompt (2 messages)" in browser.text(CURRENT)
    assert "25.0 % progression" in browser.text("#strip")


def test_enter_goes_through_the_hits_of_a_search(browser: Browser, tmp_path: Path) -> None:
    episodes = [invented_episode(k, 12) for k in range(3)]
    for episode, step in ((episodes[1], 4), (episodes[1], 9), (episodes[2], 7)):
        episode["story"][step]["response"] = "ACTION: open the chest"
    write_once(view_options(write_run(tmp_path, episodes)))
    browser.open(tmp_path / "episodes.html")
    browser.press("/")
    browser.type("the chest")
    browser.wait("document.querySelector('#count').innerText.startsWith('2 of 3')")
    for place in ("episode=2&turn=5", "episode=2&turn=10", "episode=3&turn=8"):
        browser.press("Enter")
        browser.wait(f"location.hash.includes('{place}')")


def test_hostile_names_and_numbers_are_only_text(browser: Browser, tmp_path: Path) -> None:
    rows = [{"update": k, HOSTILE: float(k), "actor/ref_kl": 9.0, "train/actor_trains": 1.0} for k in range(1, 8)]
    run = write_rows(tmp_path / "<img src=x>", rows, keys={HOSTILE: HOSTILE}, flags={"lr": [HOSTILE]})
    (run / "about.json").write_text(json.dumps({"command": HOSTILE, "verdict": {"sentence": HOSTILE}}))
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("[]\n")
    write_once(view_options(run))
    browser.open(run / "episodes.html")
    browser.evaluate("document.querySelector('.more-settings').open = true")
    shown = browser.text("#main")
    assert "</script><script>" in shown and "␛[31mred" in shown and "⟨U+202E⟩back" in shown and "line 8" in shown
    assert browser.evaluate("document.title") == "<img src=x>" and browser.evaluate("document.images.length") == 0
    assert browser.complaints == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_run_is_readable_in_both_themes_and_on_a_narrow_screen(browser: Browser, page: Path, theme: str) -> None:
    browser.prefer(theme)
    browser.open(page)
    browser.evaluate("document.querySelector('.more-settings').open = true")
    assert browser.evaluate(Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")) == []
    browser.resize(390, 800)
    browser.open(page)
    shown = "[...document.querySelectorAll('.side, main')].filter((e) => e.offsetParent).map((e) => e.tagName).join()"
    assert browser.evaluate(shown) == "MAIN" and browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert (
        browser.evaluate("document.querySelector('main').scrollWidth - document.querySelector('main').clientWidth") <= 0
    )
    browser.click("#back")
    assert browser.evaluate(shown) == "NAV"
    browser.click("#overview-button")
    assert browser.evaluate(shown) == "MAIN"


def test_a_followed_run_shows_each_new_update(browser: Browser, tmp_path: Path) -> None:
    run = write_rows(tmp_path, collapsing(10))
    book = Book(view_options(run))
    book.update()
    book.write(run / "episodes.html", follow=0.5)
    browser.open(run / "episodes.html")
    assert "running 10 updates" in browser.text(".state").replace("\n", " ")
    write_rows(tmp_path, collapsing(20))
    book.update()
    book.write(run / "episodes.html", follow=0.5)
    browser.wait("document.querySelector('.state')?.innerText.includes('20 updates')")


def test_an_empty_run_says_so(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").touch()
    write_once(view_options(tmp_path))
    browser.open(tmp_path / "episodes.html")
    assert "There are no episodes yet." in browser.text("#main") and browser.complaints == []


def several(folder: Path, variants: int, seeds: int) -> Path:
    """Runs of a study, which wrote no episodes."""
    for variant in range(variants):
        for seed in range(seeds):
            rows = [{"update": k, "turn/reward": variant + (k % 2) + 0.1 * seed} for k in range(1, 41)]
            run = write_rows(folder / f"v{variant}" / f"seed_{seed}", rows, keys={"gamma_step": 0.5 + 0.01 * variant})
            (run / "done.json").write_text("{}")
    write_once(view_options(folder))
    return folder / "episodes.html"


REWARD = "[...document.querySelectorAll('.chart')].find((c) => c.innerText.startsWith('Reward per turn'))"


def test_no_two_of_many_runs_look_alike(browser: Browser, tmp_path: Path) -> None:
    browser.open(several(tmp_path, 20, 1))
    looks = f"""[...{REWARD}.querySelectorAll('.series .path')].map((path) => {{
      const style = getComputedStyle(path);
      return style.stroke + style.strokeDasharray;
    }})"""
    assert len(set(browser.evaluate(looks))) == 20
    assert browser.text(".runs td:last-child").startswith("finished, ")


def test_the_seeds_of_a_variant_are_drawn_together_or_apart_and_smoothed(browser: Browser, tmp_path: Path) -> None:
    browser.open(several(tmp_path, 2, 3))
    lines = f"{REWARD}.querySelectorAll('.series:not(.faint)').length"
    assert (browser.evaluate(lines), browser.evaluate("document.querySelectorAll('.settings th').length")) == (2, 4)
    value = f"{REWARD}.querySelector('svg').getAttribute('aria-label')"
    assert "v0 (3 seeds): 1.10 at update 1, 0.1 at update 40" in browser.evaluate(value)
    choose = "const box = document.querySelector('#smooth'); box.value = '10'; box.dispatchEvent(new Event('change'))"
    browser.evaluate(choose)
    assert "v0 (3 seeds): 1.10 at update 1, 0.6 at update 40" in browser.evaluate(value)
    browser.click("#group-seeds")
    assert browser.evaluate(lines) == 6 and "v0/seed_2" in browser.evaluate(value)


def test_a_printed_page_shows_whole_charts(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.evaluate("getComputedStyle(document.querySelector('main')).overflowY") == "visible"
        inside = "getComputedStyle(document.querySelector('.chart')).breakInside"
        assert browser.evaluate(inside) == "avoid"
        tall = "document.documentElement.scrollHeight >= document.querySelector('main').scrollHeight"
        assert browser.evaluate(tall) and browser.evaluate("document.querySelector('main').scrollHeight > innerHeight")
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def test_the_held_out_result_is_the_measure_of_the_verdict(browser: Browser, tmp_path: Path) -> None:
    rows = [
        {"update": k, "eval/success": 0.01 * k, "eval/return": 0.1 + 0.3 * k, "eval/episodes": 64.0} for k in (0, 1)
    ]
    run = write_rows(tmp_path / "run", rows)
    (run / "summary.json").write_text(json.dumps({"verdict": {"measure": "return", "sentence": "improved: return"}}))
    write_once(view_options(run))
    browser.open(run / "episodes.html")
    assert browser.text(".chart.wide b").startswith("Held-out return")
