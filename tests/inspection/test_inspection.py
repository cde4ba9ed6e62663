"""The command `slime-verlog`: help without any package, and what is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from inspection import command
from tests.fixtures.played_episodes import invented_episode, write_run


@pytest.mark.parametrize("part", command.PARTS)
def test_a_part_explains_itself_before_anything_is_installed(part: str) -> None:
    # -S: without installed packages.
    line = [sys.executable, "-S", "-m", "inspection", part, "--help"]
    done = subprocess.run(
        line, cwd=Path(__file__).parents[2], capture_output=True, text=True, env={}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: slime-verlog {part} ")


AT_END = """
import sys
from inspection.command import main
try:
    main()
finally:
    print("loaded:", {"torch", "transformers"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "--version",
        "check envs.babaisai --task two_room-goto_win",
        "play envs.babaisai --task two_room-goto_win",
        "compare {run} {run}",
        "report {run}",
        "view {run}",
    ],
)
def test_commands_without_a_model_load_neither_torch_nor_transformers(
    tmp_path: Path, line: str
) -> None:
    run = write_run(tmp_path, [invented_episode()])
    words = [sys.executable, "-c", AT_END, *line.format(run=run).split()]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], input="/quit\n", capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded: set()"), done.stderr


def test_an_unknown_option_shows_how_its_part_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["compare", "one", "two", "--config", "my.yaml"])
    stderr = capsys.readouterr().err
    assert stderr.startswith("usage: slime-verlog compare ")
    assert "slime-verlog compare: error: unrecognized arguments: --config" in stderr
