"""The page in headless Chromium: list, keyboard, search, links, worlds, tokens, comparison, hostile
text."""

import base64
import io
from pathlib import Path

import pytest

from inspection.view.build import write_once
from tests.fixtures.browser import Browser
from tests.fixtures.played_episodes import invented_episode, record_episode, write_run
from tests.inspection.view.pages import (
    CURRENT,
    HOSTILE,
    choose,
    open_turn,
    view_options,
    write_page,
)

pytestmark = pytest.mark.usefixtures("usual_window")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten invented episodes, half of them lost, with a word each; then a BabaIsAI episode with its
    world."""
    names = [
        "apple",
        "banana",
        "cherry",
        "damson",
        "elder",
        "fig",
        "grape",
        "hazel",
        "iris",
        "juniper",
    ]
    episodes = []
    for k, name in enumerate(names):
        facts = {"success": k % 2 == 0, "task_name": f"task {k % 3}", "return": k / 10}
        episodes.append(invented_episode(100 + k, 3 + k, f"You see a {name}.", **facts))
    episodes[3] |= {"stop": "failed", "fault": "Traceback: KeyError", "success": False}
    episodes[4]["story"][1] |= {"valid": False, "response": "dance", "reward": -0.1}
    episodes[4]["valid_action_ratio"] = 6 / 7
    episodes.append(record_episode("envs.babaisai", "goto_win", 3, tokens=True))
    return write_page(tmp_path_factory.mktemp("run"), episodes)


def counts(browser: Browser) -> str:
    return browser.text("#count").split("\n")[0]


def test_filters_and_order_change_the_list_and_the_header(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert counts(browser) == "11 episodes" and len(browser.texts(".row")) == 11
    assert "1 of 11 episodes failed" in browser.text("#strip")
    browser.click(".summary tbody tr:nth-child(2) button")
    assert counts(browser) == "4 of 11 episodes" and "4 episodes" in browser.text("#strip")
    choose(browser, "#select-outcome", "failed")
    assert counts(browser) == "1 of 11 episodes" and "seed 103" in browser.text(".row")
    browser.click("#count button")
    choose(browser, "#select-sort", "return-")
    assert "#11" in browser.texts(".row")[0] and "#10" in browser.texts(".row")[1]
    assert browser.complaints == []


def test_the_keyboard_moves_between_episodes_and_turns(browser: Browser, page: Path) -> None:
    browser.open(page)
    for key in "jj":
        browser.press(key)
        browser.wait(f"document.querySelector('{CURRENT} .filled') && true")
    browser.wait("document.querySelector('[aria-selected=true]').id === 'entry-2'")
    assert "You see a banana. Step 0." in browser.text(CURRENT)
    browser.press("ArrowRight")
    browser.wait("location.hash.includes('episode=2') && location.hash.includes('turn=2')")
    browser.press("w")
    # System, observation, answer.
    browser.wait(f"document.querySelectorAll('{CURRENT} .bubble').length === 3")
    browser.press("o")
    browser.wait("document.querySelector('#main').innerText.includes('Overview')")


def test_a_link_opens_the_turn_and_filters(browser: Browser, page: Path) -> None:
    browser.open(page, "#episode=10&turn=9&task=task+0")
    browser.wait(f"document.querySelector('{CURRENT} h3')?.innerText === 'Turn 9'")
    assert counts(browser) == "4 of 11 episodes"
    browser.open(page, "#episode=999&turn=-4")
    assert "Overview" in browser.text("#main") and browser.complaints == []


def test_search_finds_text_in_any_turn_and_enter_goes_to_the_next_hit(
    browser: Browser, page: Path
) -> None:
    browser.open(page)
    browser.press("/")
    browser.type("step 10")
    browser.wait("document.querySelector('#count').innerText.startsWith('2 of 11')")
    for place in ("episode=9&turn=11", "episode=10&turn=11"):
        browser.press("Enter")
        browser.wait(f"location.hash.includes('{place}')")
    browser.evaluate("location.hash = '#q=nothing+has+this'")
    browser.wait("document.querySelector('#count').innerText.startsWith('0 of 11')")


def test_reasoning_action_and_invalid_answers_are_told_apart(browser: Browser, page: Path) -> None:
    open_turn(browser, page, "#episode=5&turn=2")
    assert browser.texts(f"{CURRENT} .bubble.invalid .role") == ["Model invalid, played: left"]
    browser.press("ArrowRight")
    assert browser.text(f"{CURRENT} .part.reasoning .text") == "step 2 looks safe."
    assert browser.text(f"{CURRENT} .part.action .text") == "left"


def test_notes_are_shown_as_such(browser: Browser, tmp_path: Path) -> None:
    episode = invented_episode()
    for k, text in enumerate(["red door", "red key"]):
        episode["story"][k] |= {
            "response": text,
            "notes": text,
            "summary": {"tokens": 2.0},
            "executed_action": "",
        }
    episode["story"][2]["notes"] = "a key"
    open_turn(browser, write_page(tmp_path, [episode]), "#episode=1&turn=2")
    assert browser.texts(f"{CURRENT} .bubble.summary .text") == ["red key"]
    assert browser.texts(f"{CURRENT} .bubble.summary .kept") == ["red"]
    assert "2 of them notes" in browser.text(".episode-head")
    assert "a key" in browser.evaluate("document.querySelector('.notes .text').textContent")


def test_the_world_plays_as_an_animation(browser: Browser, page: Path) -> None:
    browser.open(page, "#episode=11")
    browser.wait("document.querySelector('.world')?.width > 100")
    picture = "document.querySelector('.world').toDataURL()"
    first = browser.evaluate(picture)
    choose(browser, "#speed", "16")
    browser.click("#play")
    browser.wait("document.querySelector('.now').innerText.startsWith('The end')")
    assert browser.evaluate(picture) != first
    browser.click("#first")
    assert browser.evaluate(picture) == first and browser.complaints == []


def test_tokens_are_coloured_by_the_chosen_value(browser: Browser, page: Path) -> None:
    open_turn(browser, page, "#episode=11&turn=2")
    choose(browser, "#colour", "advantages")
    browser.text("h1")
    colours = (
        "new Set([...document.querySelectorAll('.token')].map((t) => t.style.backgroundColor)).size"
    )
    assert browser.evaluate(colours) > 3
    browser.evaluate(
        "document.querySelector('.tokens').focus(); document.querySelector('.token').focus()"
    )
    browser.press("ArrowRight")
    assert "advantage" in browser.text("#token-value")


def test_a_picture_in_a_prompt_is_shown_and_other_addresses_are_not(
    browser: Browser, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    file = io.BytesIO()
    image.new("RGB", (40, 30), "red").save(file, "PNG")
    address = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    episode = invented_episode(pictures={"k": address, "bad": "https://example.org/x.png"})
    episode["messages"][1]["content"] = [
        {"type": "image", "image": key} for key in ("k", "bad", None)
    ]
    browser.open(write_page(tmp_path, [episode]), "#episode=1")
    browser.wait("document.querySelector('img.picture')?.naturalWidth === 40")
    assert browser.evaluate("document.images.length") == 1


def test_two_runs_stand_side_by_side_and_open_where_only_one_won(
    browser: Browser, tmp_path: Path
) -> None:
    a = write_run(tmp_path / "a", [invented_episode(k, success=k == 2) for k in (1, 2, 3)])
    other = invented_episode(3, turns=5)
    other["story"][1] |= {"executed_action": "right", "response": "ACTION: right"}
    b = write_run(tmp_path / "b", [other, invented_episode(1), invented_episode(2)])
    write_once(view_options(a, b))
    browser.open(a / "compare.html")
    assert counts(browser) == "3 pairs"
    assert "over 3 pairs" in browser.text(".difference")
    assert "seed 2" in browser.texts(".row")[2], "both won: last"
    browser.open(a / "compare.html", "#episode=3")
    browser.wait("document.querySelector('#divergence') && true")
    browser.click("#divergence")
    browser.wait(f"document.querySelector('{CURRENT} h3')?.innerText === 'Turn 2'")
    choose(browser, "#select-outcome", "A lost, B won")
    assert counts(browser) == "2 of 3 pairs"


def test_a_branch_says_where_it_comes_from_and_stands_beside_that_episode(
    browser: Browser, tmp_path: Path
) -> None:
    a = write_run(tmp_path / "a", [invented_episode(k) for k in (1, 2)])
    branches = []
    for turn in (2, 3):
        branches.append(
            invented_episode(2, branch={"run": "a", "episode": 2, "turn": turn, "player": "policy"})
        )
        branches[-1]["story"][turn - 1] |= {"executed_action": "right", "response": "ACTION: right"}
    b = write_run(tmp_path / "b", branches, "random", "turn 2")
    write_once(view_options(a, b))
    browser.open(a / "compare.html", "#episode=3")
    browser.wait("document.querySelector('#divergence') && true")
    assert counts(browser) == "3 episodes, 2 pairs"
    assert "continues #2 of a (policy) from turn 3" in browser.text("#main h2")
    browser.click("#divergence")
    browser.wait(f"document.querySelector('{CURRENT} h3')?.innerText === 'Turn 3'")


def test_hostile_text_is_only_text(browser: Browser, tmp_path: Path) -> None:
    episode = invented_episode(
        task_name=HOSTILE, stop=HOSTILE, fault=HOSTILE, metrics={HOSTILE: 1.0}, seed=HOSTILE
    )
    for message in episode["messages"]:
        message["content"] += HOSTILE
    for turn in episode["story"]:
        turn |= {
            "response": f"THINK: {HOSTILE}\nACTION: {HOSTILE}",
            "executed_action": HOSTILE,
            "valid": False,
        }
        turn |= {"notes": HOSTILE, "tokens": {"text": [HOSTILE], HOSTILE: [1.0]}}
    episode["messages"][2] = {"role": HOSTILE, "content": "x " * 500_000 + "end of the long text"}
    open_turn(browser, write_page(tmp_path / "<b>run", [episode]), "#episode=1")
    shown = browser.text("#main")
    assert (
        "</script><script>" in shown
        and "␛[31mred" in shown
        and "⟨U+202E⟩back" in shown
        and "日本語 😀 é" in shown
    )
    assert "end of the long text" not in shown
    browser.evaluate(
        "[...document.querySelectorAll('.link')].find((e) => "
        "e.innerText.includes('characters')).click()"
    )
    assert "end of the long text" in browser.text("#main")
    assert (
        browser.evaluate("document.title") == "<b>run"
        and browser.evaluate("document.images.length") == 0
    )
    assert browser.complaints == []


def test_the_policy_forbids_everything_from_elsewhere(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert (
        browser.evaluate("fetch('data:text/plain,x').then(() => 'loaded', () => 'refused')")
        == "refused"
    )
    make_script = "document.createElement('script').text = 'document.title = 1'"
    assert (
        browser.evaluate(f"(() => {{ try {{ {make_script} }} catch {{ return 'no' }} }})()") == "no"
    )
    assert "http" not in browser.evaluate("document.querySelector('meta[http-equiv]').content")


def test_every_control_has_a_name(browser: Browser, page: Path) -> None:
    browser.open(page, "#episode=11")
    browser.wait("document.querySelector('#slider') && true")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {
        "button",
        "searchbox",
        "slider",
        "link",
        "image",
        "listbox",
        "navigation",
        "complementary",
    }
    nodes = [
        node
        for node in tree
        if not node["ignored"] and node["role"]["value"] in {*wanted, "combobox"}
    ]
    assert {node["role"]["value"] for node in nodes} >= wanted
    assert [node for node in nodes if not node.get("name", {}).get("value")] == []
