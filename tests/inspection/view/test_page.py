"""The page in headless Chromium: clicks, keyboard, search, links, worlds, tokens, comparison, hostile text, themes."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest

from inspection.view.build import write_once
from tests.fixtures.browser import Browser
from tests.fixtures.played_episodes import invented_episode, record_episode, write_run
from tests.inspection.view.options import view_options

pytestmark = pytest.mark.usefixtures("usual_window")
CURRENT = ".turn-row.current"
HOSTILE = (
    "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
    " ${1} {{2}} <!-- \x00\x1b[31mred\x1b[0m \u202eback\u202c \u200b 日本語 😀 é"
)


def write_page(folder: Path, episodes: list[dict[str, Any]], **options: Any) -> Path:
    run = write_run(folder, episodes)
    write_once(view_options(run, **options))
    return run / "episodes.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten invented episodes, half of them lost, with a word each; then a BabaIsAI episode with its world."""
    folder = tmp_path_factory.mktemp("run")
    names = ["apple", "banana", "cherry", "damson", "elder", "fig", "grape", "hazel", "iris", "juniper"]
    episodes = [
        invented_episode(
            100 + k, 3 + k, f"You see a {name}.", success=k % 2 == 0, task_name=f"task {k % 3}", **{"return": k / 10}
        )
        for k, name in enumerate(names)
    ]
    episodes[3] |= {"stop": "failed", "fault": "Traceback: KeyError", "success": False}
    episodes[4]["story"][1] |= {"valid": False, "response": "dance", "reward": -0.1}
    episodes[4]["valid_action_ratio"] = 6 / 7
    return write_page(folder, [*episodes, record_episode("envs.babaisai", "goto_win", 3, tokens=True)])


def counts(browser: Browser) -> str:
    return browser.text("#count").split("\n")[0]


def test_the_page_opens_with_list_header_and_overview(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert counts(browser) == "11 episodes"
    assert "1 of 11 episodes failed" in browser.text("#strip") and "won" in browser.text("#strip")
    rows = browser.texts(".summary tbody tr")
    assert len(rows) == 4 and rows[0].startswith("babaisai/goto_win")
    assert len(browser.texts(".row")) == 11
    assert browser.complaints == []


def test_filters_order_and_clear_change_the_list_and_the_header(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.click(".summary tbody tr:nth-child(2) button")
    assert counts(browser) == "4 of 11 episodes" and "4 episodes" in browser.text("#strip")
    browser.evaluate("document.querySelector('#select-outcome').value = 'failed'")
    browser.evaluate("document.querySelector('#select-outcome').dispatchEvent(new Event('change'))")
    assert counts(browser) == "1 of 11 episodes" and "seed 103" in browser.text(".row")
    browser.click("#count button")
    assert counts(browser) == "11 episodes"
    browser.evaluate("document.querySelector('#select-sort').value = 'return-'")
    browser.evaluate("document.querySelector('#select-sort').dispatchEvent(new Event('change'))")
    assert "#11" in browser.texts(".row")[0] and "#10" in browser.texts(".row")[1]
    browser.evaluate("document.querySelector('#select-valid').value = 'some'")
    browser.evaluate("document.querySelector('#select-valid').dispatchEvent(new Event('change'))")
    assert counts(browser) == "1 of 11 episodes"


def test_a_click_opens_an_episode_and_the_address_names_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.click("#entry-2")
    browser.wait("document.querySelectorAll('.turn').length === 4")
    assert "#episode=2" in browser.evaluate("location.hash")
    assert "You see a banana. Step 0." in browser.text(CURRENT)
    assert browser.text("#live").startswith("Episode 2, task 1, lost, 4 turns")


def test_the_keyboard_moves_between_episodes_and_turns(browser: Browser, page: Path) -> None:
    browser.open(page)
    for key in "jjj":
        browser.press(key)
        browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
    browser.wait("document.querySelector('[aria-selected=true]').id === 'entry-3'")
    browser.press("k")
    browser.wait("document.querySelector('.episode-head')?.innerText.includes('#2')")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    browser.wait(f"document.querySelector('{CURRENT} h3')?.innerText === 'Turn 3'")
    browser.press("ArrowLeft")
    browser.wait("location.hash.includes('turn=2')")
    browser.press("w")
    browser.wait(f"document.querySelectorAll('{CURRENT} .bubble').length === 3")  # system, observation, answer
    browser.press("?")
    browser.wait("document.querySelector('#help').open")
    browser.press("Escape")
    browser.wait("!document.querySelector('#help').open && !document.activeElement.closest('dialog')")
    browser.press("o")
    browser.wait("document.querySelector('#main').innerText.includes('Overview')")


def test_a_link_opens_the_turn_and_a_reload_keeps_everything(browser: Browser, page: Path) -> None:
    browser.open(page, "#episode=10&turn=9&task=task+0")
    browser.wait(f"document.querySelector('{CURRENT} h3')?.innerText === 'Turn 9'")
    assert counts(browser) == "4 of 11 episodes"
    top = "document.querySelector('.turn-row.current').getBoundingClientRect().top"
    browser.wait(f"{top} > 60 && {top} < 300")
    browser.evaluate("location.hash = '#episode=1&turn=2'")
    browser.wait("document.querySelector('.episode-head').innerText.includes('#1')")
    assert browser.text(f"{CURRENT} h3") == "Turn 2"
    browser.open(page, "#episode=999&turn=-4")
    assert "Overview" in browser.text("#main") and browser.complaints == []


def test_search_finds_text_in_any_turn_and_opens_there(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("/")
    browser.type("GRAPE. step 5")
    browser.wait("document.querySelectorAll('.row').length === 1")
    browser.press("Escape")
    assert counts(browser) == "11 episodes"
    browser.type("hazel. Step 4")
    browser.wait("document.querySelector('#count').innerText.startsWith('1 of 11')")
    browser.click(".row")
    browser.wait(f"document.querySelector('{CURRENT} h3')?.innerText === 'Turn 5'")
    assert browser.evaluate("CSS.highlights.get('found').size") >= 1
    browser.evaluate("location.hash = '#q=nothing+has+this'")
    browser.wait("document.querySelector('#count').innerText.startsWith('0 of 11')")
    assert "No episode matches" in browser.text("#list")


def test_reasoning_action_and_invalid_answers_are_told_apart(browser: Browser, page: Path) -> None:
    browser.open(page, "#episode=5&turn=2")
    browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
    assert browser.texts(f"{CURRENT} .bubble.invalid .role") == ["Model invalid, played: left"]
    assert "reward −0.10" in browser.text(CURRENT)
    browser.press("ArrowRight")
    assert browser.text(f"{CURRENT} .part.reasoning .text") == "step 2 looks safe."
    assert browser.text(f"{CURRENT} .part.action .text") == "left"
    assert browser.texts(f"{CURRENT} .same") == ["Current Observation:"], "only this line was there before"
    browser.click(f"{CURRENT} .tool:last-child")
    assert browser.text(f"{CURRENT} .bubble.assistant .mono") == "THINK: step 2 looks safe.\nACTION: left"


def test_notes_stand_below_the_answer_that_wrote_or_kept_them(browser: Browser, tmp_path: Path) -> None:
    episode = invented_episode()
    episode["story"][1] |= {"notes": f"the key is red {HOSTILE}"}
    browser.open(write_page(tmp_path, [episode]), "#episode=1&turn=2")
    browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
    assert "the key is red" in browser.text(f"{CURRENT} .notes .text")
    assert len(browser.texts(".notes")) == 1 and browser.evaluate("document.title") != "owned"


def test_a_turn_that_wrote_notes_looks_different_and_marks_what_it_kept(browser: Browser, tmp_path: Path) -> None:
    episode = invented_episode()
    for k, text in enumerate(["red door", "red key"]):
        episode["story"][k] |= {"response": text, "notes": text, "summary": {"tokens": 2.0}, "executed_action": ""}
    browser.open(write_page(tmp_path, [episode]), "#episode=1&turn=2")
    browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
    assert browser.texts(f"{CURRENT} .bubble.summary .kept") == ["red"]
    assert (
        browser.texts(f"{CURRENT} .bubble.summary .text") == ["red key"] and len(browser.texts(".bubble.summary")) == 2
    )
    assert "Bold: words copied from the notes before" in browser.text(f"{CURRENT} .bubble.summary")
    assert "3 turns, 2 of them notes" in browser.text(".episode-head") and "2 of them notes" in browser.text(".row")
    assert browser.text(".now").startswith("Turn 2 of 3")
    colour = "getComputedStyle(document.querySelector('.bubble.summary .role i')).color"
    assert browser.evaluate(colour) == browser.evaluate("getComputedStyle(document.querySelector('.muted')).color")


def test_the_world_plays_as_an_animation(browser: Browser, page: Path) -> None:
    browser.open(page, "#episode=11")
    browser.wait("document.querySelector('.world')?.width > 100")
    picture = "document.querySelector('.world').toDataURL()"
    first = browser.evaluate(picture)
    assert len(browser.texts(".thumb")) == len(browser.texts(".turn"))
    browser.evaluate("document.querySelector('#speed').value = '16'")
    browser.evaluate("document.querySelector('#speed').dispatchEvent(new Event('change'))")
    browser.click("#play")
    browser.wait("document.querySelector('.now').innerText.startsWith('The end')")
    assert browser.evaluate(picture) != first
    assert browser.evaluate("document.querySelector('#slider').getAttribute('aria-valuetext')").startswith("The end")
    browser.wait("document.querySelector('#play').getAttribute('aria-label') === 'Play (p)'")
    browser.click("#first")
    assert browser.evaluate(picture) == first and browser.complaints == []


def test_tokens_are_coloured_by_the_chosen_value(browser: Browser, page: Path) -> None:
    browser.resize(1400, 400)  # the episode must be longer than the window
    browser.open(page, "#episode=11&turn=2")
    browser.wait("document.querySelector('#colour') && document.querySelector('.turn-row.current .filled') && true")
    browser.text("h1")
    place = f"document.querySelector('{CURRENT}').getBoundingClientRect().top"
    before = browser.evaluate(place)
    browser.evaluate("document.querySelector('#colour').value = 'advantages'")
    browser.evaluate("document.querySelector('#colour').dispatchEvent(new Event('change'))")
    browser.text("h1")
    assert browser.evaluate(place) == pytest.approx(before, abs=1), "the turn stays in view"
    colours = browser.evaluate(
        "new Set([...document.querySelectorAll('.token')].map((t) => t.style.backgroundColor)).size"
    )
    assert colours > 3
    assert "−" in browser.text(".scale")
    browser.evaluate("document.querySelector('.tokens').focus(); document.querySelector('.token').focus()")
    browser.press("ArrowRight")
    assert "advantage" in browser.text("#token-value") and "advantage" in browser.text("#live")


def test_a_picture_in_a_prompt_is_shown_and_other_addresses_are_not(browser: Browser, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    file = io.BytesIO()
    image.new("RGB", (40, 30), "red").save(file, "PNG")
    address = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    episode = invented_episode(pictures={"k": address, "bad": "https://example.org/x.png"})
    episode["messages"][1]["content"] = [{"type": "image", "image": key} for key in ("k", "bad", None)]
    browser.open(write_page(tmp_path, [episode]), "#episode=1")
    browser.wait("document.querySelector('img.picture')?.naturalWidth === 40")
    assert browser.evaluate("document.images.length") == 1
    assert browser.text(CURRENT).count("A picture that the record does not hold") == 2


def test_two_runs_stand_side_by_side_by_seed(browser: Browser, tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [invented_episode(k, success=False) for k in (1, 2)])
    b = write_run(tmp_path / "b", [invented_episode(k, turns=5) for k in (2, 3, 1)])
    write_once(view_options(a, b))
    browser.open(a / "compare.html")
    assert counts(browser) == "3 episodes, 2 pairs"
    assert "+100.0 ± 0.0 points (standard error), over 2 pairs" in browser.text(".difference")
    assert browser.texts(".row .line-2 span:last-child") == ["seed 1", "seed 2", "seed 3"]
    browser.click("#entry-1")
    browser.wait("document.querySelectorAll('.turn-row').length === 6")
    assert "The episode is over." in browser.evaluate("document.querySelectorAll('.turn-row')[4].textContent")
    browser.evaluate("document.querySelector('#select-outcome').value = 'A lost, B won'")
    browser.evaluate("document.querySelector('#select-outcome').dispatchEvent(new Event('change'))")
    assert counts(browser) == "2 of 3 pairs"


def test_hostile_text_is_only_text(browser: Browser, tmp_path: Path) -> None:
    episode = invented_episode(task_name=HOSTILE, stop=HOSTILE, fault=HOSTILE, metrics={HOSTILE: 1.0}, seed=HOSTILE)
    for message in episode["messages"]:
        message["content"] += HOSTILE
    for turn in episode["story"]:
        turn |= {"response": f"THINK: {HOSTILE}\nACTION: {HOSTILE}", "executed_action": HOSTILE, "valid": False}
        turn["tokens"] = {"text": [HOSTILE], HOSTILE: [1.0]}
    episode["messages"][2] = {"role": HOSTILE, "content": "x " * 500_000 + "end of the long text"}
    browser.open(write_page(tmp_path / "<b>run", [episode]), "#episode=1")
    browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
    shown = browser.text("#main")
    assert "</script><script>" in shown and "␛[31mred" in shown and "⟨U+202E⟩back" in shown and "日本語 😀 é" in shown
    assert "end of the long text" not in shown
    browser.evaluate("[...document.querySelectorAll('.link')].find((e) => e.innerText.includes('characters')).click()")
    assert "end of the long text" in browser.text("#main")
    assert browser.evaluate("document.title") == "<b>run" and browser.evaluate("document.images.length") == 0
    assert browser.complaints == []


def test_the_policy_forbids_everything_from_elsewhere(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate("fetch('data:text/plain,x').then(() => 'loaded', () => 'refused')") == "refused"
    make_script = "document.createElement('script').text = 'document.title = 1'"
    assert browser.evaluate(f"(() => {{ try {{ {make_script} }} catch {{ return 'no' }} }})()") == "no"
    assert "http" not in browser.evaluate("document.querySelector('meta[http-equiv]').content")


def test_a_followed_page_reloads_and_keeps_the_episode(browser: Browser, tmp_path: Path) -> None:
    from inspection.view.build import Book

    run = write_run(tmp_path, [invented_episode(1), invented_episode(2, turns=30)])
    options, path = view_options(run), run / "episodes.html"
    book = Book(options)
    book.update()
    book.write(path, follow=0.5)
    browser.open(path, "#episode=2&turn=20")
    browser.wait("document.querySelector('#follow')?.innerText.startsWith('Live')")
    write_run(tmp_path, [invented_episode(3)])
    book.update()
    book.write(path, follow=0.5)
    browser.wait("document.querySelector('#count')?.innerText === '3 episodes'")
    browser.wait(f"document.querySelector('{CURRENT} h3')?.innerText === 'Turn 20'")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser: Browser, page: Path, theme: str, tmp_path: Path) -> None:
    browser.prefer(theme)
    for anchor in ("", "#episode=5&turn=2", "#episode=11"):
        browser.open(page, anchor)
        weak = browser.evaluate(Path(__file__).with_name("contrast.js").read_text(encoding="utf-8"))
        assert weak == []
    browser.screenshot(tmp_path / f"{theme}.png")
    assert (tmp_path / f"{theme}.png").stat().st_size > 20_000


def test_the_switch_overrides_the_systems_colours_and_is_remembered(browser: Browser, page: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    browser.open(page)
    light = browser.evaluate(background)
    browser.press("t")
    assert browser.evaluate(background) == light
    browser.press("t")
    dark = browser.evaluate(background)
    assert dark != light
    browser.open(page)
    assert browser.evaluate(background) == dark
    browser.press("t")
    assert browser.evaluate(background) == light


def test_every_control_has_a_name_and_every_region_a_label(browser: Browser, page: Path) -> None:
    browser.open(page, "#episode=11")
    browser.wait("document.querySelector('#slider') && true")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "combobox", "searchbox", "slider", "link", "image", "listbox", "navigation", "complementary"}
    nodes = [node for node in tree if not node["ignored"] and node["role"]["value"] in wanted]
    assert {node["role"]["value"] for node in nodes} >= wanted - {"combobox"}
    assert [node for node in nodes if not node.get("name", {}).get("value")] == []
    assert browser.evaluate("document.querySelectorAll('main, header, nav, aside').length") == 4


def test_on_a_narrow_screen_list_and_episode_take_turns(browser: Browser, page: Path) -> None:
    browser.resize(390, 800)
    browser.open(page)
    shown = "[...document.querySelectorAll('.side, main')].filter((e) => e.offsetParent).map((e) => e.tagName).join()"
    assert browser.evaluate(shown) == "NAV"
    browser.click("#entry-3")
    browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
    assert browser.evaluate(shown) == "MAIN"
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    browser.open(page, "#episode=11")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    browser.click("#back")
    assert browser.evaluate(shown) == "NAV"


def test_a_long_list_has_only_the_rows_in_view(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page(tmp_path, [invented_episode(k, turns=1) for k in range(1500)]))
    assert len(browser.texts(".row")) < 60
    browser.evaluate("document.querySelector('#list').scrollTop = 1e9")
    browser.wait("document.querySelector('#entry-1500') && true")
