"""A generated game with one mistake is refused with one sentence, and the line of the user's
method."""

import sys
from pathlib import Path

import pytest

from embedded.warmstart.demonstrations import demonstrate
from inspection.command import main
from inspection.target import read_target
from rollout.errors import EnvironmentFault
from tests.fixtures.command import slime_verlog

PLAY = "return self.look(right)\n"
MISTAKES = {
    "play returns None": (
        PLAY,
        "self.look(right)\n",
        "`play` returned None; return a Frame",
        "def play(",
    ),
    "no reward": (
        "reward=reward",
        "reward=None",
        "reward of a Frame must be float, got None",
        "return Frame(",
    ),
    "no metrics": (
        "            text,\n",
        "            text, metrics=None,\n",
        "metrics of a Frame must be Mapping",
        "return Frame(",
    ),
    "start with an argument": (
        "def start(self)",
        "def start(self, seed)",
        "start cannot be called as start(self): missing a required argument: 'seed'",
        "def start(",
    ),
}
SCRIPTS = {
    "expert_action": (
        "return env.plan[env.reached]\n",
        "return 3\n",
        "`expert_action` returned 3; return text",
    ),
    "explain_action": (
        'return f"Step',
        'return None and f"Step',
        "`explain_action` returned None; return text",
    ),
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that leaves `sys.path` with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def write_broken(folder: Path, old: str, new: str, blamed: str) -> str:
    """Write the game with a mistake; returns the place of the line with the text `blamed`."""
    assert slime_verlog("init", "lights") == 0
    file = folder / "lights.py"
    code = file.read_text()
    assert code.count(old) == 1
    file.write_text(code.replace(old, new))
    lines = file.read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if blamed in line)}"


def says(capfd: pytest.CaptureFixture[str], words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    return "".join((*capfd.readouterr(), str(ended.value)))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_frame_that_cannot_be_used_is_blamed_on_the_users_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mistake: str
) -> None:
    old, new, sentence, blamed = MISTAKES[mistake]
    place = write_broken(tmp_path, old, new, blamed)
    shown = says(capfd, "check lights.py --no-prompt")
    assert sentence in shown and place in shown and "never awaited" not in shown, shown


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_returns_no_text_is_refused_wherever_it_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    old, new, sentence = SCRIPTS[name]
    said = f"{sentence} ({write_broken(tmp_path, old, new, f'def {name}(')})"
    assert said in says(capfd, "check lights.yaml --no-prompt")
    if name == "expert_action":  # an evaluation does not ask for the explanation
        words = "evaluate lights.yaml --player expert --episodes 1 --out out"
        assert said in says(capfd, words)
    with pytest.raises(EnvironmentFault) as caught:
        demonstrate(read_target("lights.yaml").settings, 1, 0.0, 0)
    assert str(caught.value) == said
