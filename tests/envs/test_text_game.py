"""What all games share: finding the action in an answer, paying for it, templates."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.errors import ConfigError
from envs.templates import render_template
from envs.text_game import Frame, GameSettings, TextGame, find_action
from slime_verlog import read_settings

MARKED = st.lists(
    st.sampled_from(["ACTION:", "action:", " Action ", "THINK:", " ", "\n", "go", "left", "\u2003"])
)


def _verlogs_rule(answer: str) -> str:
    for marker in ("ACTION:", "action:", "Action "):
        if marker in answer:
            return answer.split(marker)[-1].strip()
    return answer


@given(st.one_of(st.text("abc :\n\u2003"), MARKED.map("".join)))
def test_the_action_is_found_where_verlog_finds_it_and_its_span_marks_it(answer: str) -> None:
    candidate, (start, end) = find_action(answer)
    assert candidate == _verlogs_rule(answer) == answer[start:end]


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("THINK: go\nAction: go forward", "go forward"),
        ("**Action:** go forward", "go forward"),
        ("Final Action - go forward", "go forward"),
        ("ACTION : -1", "-1"),
        ("My Actions so far were bad.", "My Actions so far were bad."),
        ("<think>The ball is left. Perhaps ACTION: turn left", ""),
        ("\n<think>ACTION: left</think>\n<think>Or ACTION: right", ""),
        ("<think>Perhaps ACTION: turn left.</think>\nACTION: turn right", "turn right"),
        ("I know: ACTION: turn left</think>turn right", "turn right"),
        ("ACTION: right\n<think>or ACTION: left", "right"),
    ],
)
def test_no_mark_is_part_of_the_action_and_reasoning_names_none(response: str, action: str) -> None:
    candidate, (start, end) = find_action(response)
    assert candidate == response[start:end] == action


class Coin(TextGame):
    """`heads` pays 0.5 and ends, `tails` goes on for three turns."""

    actions = ("heads", "tails")
    default_action = "tails"

    def start(self) -> Frame:
        self.turn = 0
        return Frame("toss", "now")

    def play(self, action: str) -> Frame:
        self.turn += 1
        won, late = action == "heads", self.turn >= 3
        return Frame(
            f"turn {self.turn}",
            reward=0.5 * won,
            terminated=won,
            truncated=late,
            progression=float(won),
        )

    def render_prompt(self) -> str:
        return "prompt"


@pytest.mark.parametrize(
    ("answer", "options", "reward"),
    [
        ("heads", {}, 0.5),
        ("heads", {"binary_reward": True}, 1.0),
        ("tails", {"binary_reward": True}, 0.0),
        ("edge", {"format_penalty": 0.1}, -0.1),
        ("edge", {"format_penalty": 0.0}, 0.0),
    ],
)
def test_penalty_replaces_the_reward_and_binary_reward_rounds_gains_up(
    answer: str, options: dict[str, Any], reward: float
) -> None:
    game = Coin(GameSettings(**options))
    game.reset()
    assert game.step(answer)[2]["reward"] == reward


def test_the_time_left_is_shown_in_tenths_of_the_limit_if_asked_for() -> None:
    game = Coin(GameSettings(show_time_left=True))
    with pytest.raises(
        ConfigError, match=r"env\.show_time_left: this game ends at no step; set env\.max_steps"
    ):
        game.reset()
    game.max_steps = 3
    seen = [game.reset(), *(game.step("tails")[0] for _ in range(3))]
    shown = [observation["text"]["short_term_context"] for observation in seen]
    assert shown == ["now\nTime left: 100%", "Time left: 70%", "Time left: 40%", "Time left: 0%"]
    assert Coin(GameSettings()).reset()["text"]["short_term_context"] == "now"
    with pytest.raises(ConfigError, match=r"env\.show_time_left adds text, which vlm: only hides"):
        read_settings(GameSettings, {"show_time_left": True, "vlm": "only"}, "env.")


class Walk(TextGame):
    """Never ends by itself."""

    actions, default_action = ("left", "right"), "left"

    def start(self) -> Frame:
        return Frame("A room.")

    async def play(self, action: str) -> Frame:  # type: ignore[override]
        await asyncio.sleep(0)
        return Frame(f"You went {action}.", terminated=action == "right")

    def render_prompt(self) -> str:
        return "Walk."


def test_the_step_limit_of_the_settings_truncates_any_game() -> None:
    game = Walk(GameSettings(max_steps=3, show_time_left=True))
    for _ in range(2):  # the same in a second episode, played asynchronously
        assert game.reset()["text"]["short_term_context"] == "Time left: 100%"
        ends = [game.step("left")[1:] for _ in range(3)]
        assert [done for done, _ in ends] == [False, False, True]
        assert ends[-1][1]["truncated"] and not ends[-1][1]["terminated"] and game.max_steps == 3
    game.reset()
    game.step("left"), game.step("left")
    info = game.step("right")[2]
    assert info["terminated"] and not info["truncated"]


def test_game_text_is_never_read_as_template(tmp_path: Path) -> None:
    file = tmp_path / "ok.j2"
    file.write_text("goal: {{ mission }}")
    assert render_template(file, {"mission": "{{ 7 * 7 }}"}) == "goal: {{ 7 * 7 }}"
