"""`slime-verlog play`: a person plays through a pipe or a terminal, with the prompts of a
rollout."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.fixtures.command import slime_verlog
from tests.inspection.test_check import GAME, write

ROOT = Path(__file__).parents[2]
PICTURE_GAME = GAME.replace(
    "make_observation(self.show())",
    "make_observation(self.show(), images=[Image.new('RGB', (8, 4), 'red')])",
).replace("import os\n", "from PIL import Image\n")


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """A function that types lines and returns what was shown; `code` changes the environment,
    `keys` the YAML."""

    def run(*lines: str, code: str = GAME, words: tuple[Any, ...] = (), **keys: Any) -> str:
        path = write(tmp_path, code, **keys)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert slime_verlog("play", path, "--out", tmp_path / "pictures", *words) == 0
        return capsys.readouterr().out

    return run


def test_an_action_shows_reward_validity_executed_action_and_what_is_new(play: Any) -> None:
    shown = play("up", "dance")
    first, second, third = shown.split("> ")[:3]
    assert (
        "[system]\nClimb to step 3.\n\n[user]\nCurrent Observation:\nYou stand on step 0." in first
    )
    assert (
        "up\nreward 0   valid, executed: up   1 turn, return 0\n\n[user]\nCurrent Observation:\n"
        in second
    )
    assert "Climb" not in second
    assert "reward 0   INVALID, executed instead: down   2 turns" in third
    assert shown.endswith("stopped after 2 turns, return 0\n")


def test_the_whole_prompt_is_shown_on_demand_with_the_memory_of_the_yaml(play: Any) -> None:
    shown = play("up", "up", "p", memory={"kind": "window", "n": 2}).split("> ")[3]
    assert "[system]\nClimb to step 3." in shown
    assert "[user]\nObservation:\nYou stand on step 0.\n\n[assistant]\nPrevious plan:\nup" in shown
    assert shown.count("Previous plan") == 2


def test_a_person_writes_notes_and_sees_them_in_the_next_prompts(play: Any) -> None:
    keys = {"memory": {"kind": "inline_notes", "n": 0}}
    code = GAME.replace(
        "        valid =",
        "        response_text = response_text.split('ACTION: ')[-1]\n        valid =",
    )
    first, second, third = play("NOTES: floor 1\\nACTION: up", "up", code=code, **keys).split("> ")[
        :3
    ]
    assert "Your notes" not in first and "NOTES: what you want to remember" in first
    shown = "You stand on step {}.\n\nYour notes:\nfloor 1\n\n"
    assert shown.format(1) in second and shown.format(2) in third


def test_a_person_is_asked_for_notes_which_are_no_move(play: Any) -> None:
    keys = {"memory": {"kind": "notes", "every": 1, "keep": 0, "max_tokens": 2}}
    first, asked, later = play("up", "floor 1, a wall", **keys).split("> ")[:3]
    assert (
        "Write your notes now" not in first
        and "Write your notes now" in asked
        and "1 turn, return" in asked
    )
    assert "noted; the environment did not move   1 turn, return" in later
    assert "You stand on step 1.\n\nYour notes:\nfloor 1,\n" in later, (
        "cut to two tokens of four characters"
    )


def test_the_expert_the_actions_and_the_help_are_shown_on_demand(play: Any) -> None:
    shown = play("/expert", "/actions", "/help", "/dance")
    assert "the expert would answer: up" in shown and "> /actions\nup\ndown\n" in shown
    assert "/restart" in shown
    assert "unknown command /dance; /help lists the commands" in shown
    assert "no expert_action(env)" in play("/expert", code=GAME[: GAME.index("def expert_action")])


def test_the_next_seed_and_the_same_one_can_be_played(play: Any) -> None:
    shown = play("up", "/restart", "/next", "/quit", "up", words=("--seed", 7))
    assert "seed 7. /help" in shown and "\nseed 7\n" in shown and "\nseed 8\n" in shown
    assert shown.endswith("/quit\nstopped after 0 turns, return 0\n")
    over = play("down", "down", "up", max_turns=2)
    assert "the episode is over (max_turns)" in over and "the episode is over; /restart" in over


def test_pictures_are_written_and_named_in_the_prompt(play: Any, tmp_path: Path) -> None:
    shown = play("up", code=PICTURE_GAME)
    path = tmp_path / "pictures" / "picture_0000.png"
    assert f"[picture 8 x 4: {path}]\nCurrent Observation:" in shown
    assert Image.open(path).size == (8, 4)


def test_control_characters_of_an_environment_do_not_reach_the_terminal(play: Any) -> None:
    shown = play(code=GAME.replace('f"You stand', 'f"\\x1b[2JYou stand'))
    assert "\\x1b[2JYou stand" in shown and "\x1b" not in shown


def test_in_a_terminal_ctrl_c_ends_in_a_sentence(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "inspection",
        "play",
        str(write(tmp_path)),
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT)
    os.close(theirs)
    try:
        shown = _read_until(ours, r"\[system\].*> ")
        os.write(ours, b"up\r")
        shown += _read_until(ours, r"1 turn, return 0.*> ")
        stopped = ""
        for _ in range(24):
            # A signal between the prompt and the wait for a key is seen only with the next one.
            process.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 5.0)[0]:
                stopped = _read_until(ours, r"stopped after 1 turn, return 0")
                break
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert "Traceback" not in shown + stopped and "\x1b[1m[system]" in shown


def _read_until(descriptor: int, pattern: str) -> str:
    """What the terminal shows until the pattern matches."""
    text = ""
    end = time.monotonic() + 120
    while not re.search(pattern, text, re.DOTALL):
        assert select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0], text
        text += os.read(descriptor, 4096).decode()
    return text
