"""`slime-verlog check`: broken environments end in a sentence, and questionable ones in a
warning."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.bridge.flags import RolloutFlags
from rollout.bridge.settings import RolloutSettings
from rollout.preflight import first_prompt_check
from rollout.tasks import try_each_task
from slime_verlog import ConfigError, read_settings
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.command import error_of, slime_verlog

ROOT = Path(__file__).parents[2]
GAME = """\
import os
from envs.base import BaseInteractionEnv, make_observation

DEFAULT_TASK = "stairs"


class Stairs(BaseInteractionEnv):
    instruction_prompt, actions, default_action = "Climb to step 3.", ("up", "down"), "down"
    max_steps = 20
    deterministic = True

    def reset(self):
        self.level = self.steps = 0
        return make_observation(self.show())

    def show(self):
        return f"You stand on step {self.level}."

    def step(self, response_text):
        valid = response_text in self.actions
        self.steps += 1
        self.level = self.level + 1 if response_text == "up" else 0
        won, late = self.level == 3, self.steps == self.max_steps
        return make_observation(self.show()), won or late, {
            "reward": float(won), "terminated": won, "truncated": late and not won, "valid_action": valid,
            "executed_action": response_text if valid else "down", "progression": float(won),
        }


def build_env(sample, args):
    if sample.metadata["task"] != "stairs":
        from envs.errors import ConfigError
        raise ConfigError(f"unknown task {sample.metadata['task']!r}; known: stairs")
    return Stairs()


def expert_action(env):
    return "up"
"""
SHOW = 'return f"You stand'
RESET = "self.level = self.steps = 0"
HARD = ("self.level == 3", "self.level == 9")
"""Makes random play last."""
QUESTIONABLE = {
    "the reward never changes": (
        [('"reward": float(won)', '"reward": 0.0')],
        "warning reward: always 0 in expert and random play",
    ),
    "all answers are invalid": (
        [("valid = response_text in self.actions", "valid = False"), HARD],
        "warning actions: none of 20 answers drawn from actions was valid",
    ),
    "an answer without an action breaks the game": (
        [
            (
                "valid = response_text in self.actions",
                "valid = response_text.split()[0] in self.actions",
            )
        ],
        "error contract: task 'stairs': step raised IndexError: list index out of range at",
    ),
    "an answer without an action counts as one": (
        [("valid = response_text in self.actions", "valid = True")],
        "warning any text: responses without an action are taken; 3 of 3 counted as valid",
    ),
    "the default action is none of the actions": (
        [('"down"), "down"', '"down"), "fall"')],
        "warning actions: default_action 'fall' is not one of actions",
    ),
    "the prompt grows": (
        [(SHOW, 'return "You wait. " * self.steps ** 2 + f"You stand'), HARD],
        "warning prompt: grows during the episode",
    ),
    "a long observation": (
        [(SHOW, 'return "x" * 30_000 + f"You stand')],
        "warning observation: long: 30,021",
    ),
    "the expert loses": (
        [('return "up"', 'return "down"')],
        "warning expert: the expert does not succeed",
    ),
    "nothing ends the game": (
        [("max_steps = 20", "max_steps = 0"), HARD],
        "warning ending: an episode did not end",
    ),
    "state survives a reset": (
        [(RESET, "self.steps, self.level = 0, getattr(self, 'level', 0)")],
        "error replay: the first observation after a second reset differs",
    ),
    "two episodes share their state": (
        [
            (
                "class Stairs(BaseInteractionEnv):",
                "class Stairs(BaseInteractionEnv):\n    seen = []",
            ),
            (RESET, RESET + "; self.seen.clear()"),
            ("self.steps += 1", "self.steps += 1; self.seen.append(1)"),
            (SHOW, 'return f"{len(self.seen)} turns. You stand'),
        ],
        "error replay: a replay beside another episode in the same process differs at step 1; keep",
    ),
    "another world in each process": (
        [(SHOW, 'return f"{os.getpid()} You stand')],
        "error replay: the first observation in another process differs",
    ),
    "one episode for all seeds": (
        [],
        "warning seeds: seed 0 and three others are the same episode",
    ),
    "a game that says that it is random": (
        [
            (SHOW, 'return f"{os.getpid()} You stand'),
            ("deterministic = True", "deterministic = False"),
        ],
        "ok replay: the first observation in another process differs, as deterministic = False "
        "says",
    ),
    "returns that a critic cannot learn": (
        [('float(won), "ter', '100.0 * won, "ter')],
        "warning scale: an episode's rewards add up to 100; keep returns between about -1 and "
        "10, or the critic",
    ),
    "a fault in the middle": (
        [("in self.actions", "in self.actions and 0 <= 1 / (2 - self.steps)")],
        "error contract: task 'stairs': step raised ZeroDivisionError: division by zero at",
    ),
}


def write(folder: Path, code: str = GAME, **keys: Any) -> Path:
    (folder / "stairs.py").write_text(code)
    path = folder / "stairs.yaml"
    config = {
        "rollout_interaction_env_path": str(folder / "stairs.py"),
        "tasks": ["stairs"],
        **keys,
    }
    path.write_text(yaml.safe_dump(config))
    return path


def check(*words: Any) -> int:
    return slime_verlog("check", *words)


def found_in(text: str) -> dict[str, str]:
    """The rows that `check` printed, by the name of the check: status and detail."""
    rows = re.findall(r"^  (ok|warning|error) +(\S.{11}) ?(.*)$", text, re.MULTILINE)
    return {name.strip(): f"{status} {detail}" for status, name, detail in rows}


@pytest.mark.parametrize("case", QUESTIONABLE)
def test_a_questionable_environment_is_named_by_the_check_that_finds_it(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, expected = QUESTIONABLE[case]
    code = GAME
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    status = check(write(tmp_path, code))
    head, _, words = expected.partition(": ")
    kind, _, name = head.partition(" ")
    assert found_in(capsys.readouterr().out)[name].startswith(f"{kind} {words}")
    assert status == int(kind == "error")


@pytest.mark.parametrize(("gamma", "is_far"), [(None, True), (0.9967, False)])
def test_a_reward_beyond_the_discounts_reach_is_a_warning(
    tmp_path: Path, gamma: float | None, is_far: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code = GAME.replace("max_steps = 20", "max_steps = 900").replace(
        "won, late = self.level", "won, late = self.steps"
    )
    keys = {} if gamma is None else {"gamma_step": gamma}
    assert (
        check(write(tmp_path, code.replace("== 3,", "== 300,"), **keys), "--max-turns", "400") == 0
    )
    found = found_in(capsys.readouterr().out)
    assert ("gamma_step 0.99, the first turn sees 5.0%" in found.get("discount", "")) == is_far


@pytest.mark.parametrize(("ends", "status"), [([0.0, 1.0], "ok"), ([0.0, 0.5], "warning")])
def test_returns_outside_the_critics_range_are_a_warning(
    tmp_path: Path, ends: list[float], status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(write(tmp_path, GAME, value_loss="hl_gauss", value_range=ends)) == 0
    found = found_in(capsys.readouterr().out)["range"]
    assert found.startswith(
        f"{status} value_range is [0, {ends[1]:g}], and the discounted returns are between 0"
    )


def test_a_working_environment_has_no_warnings_and_shows_its_prompt_with_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = GAME.replace(
        "return Stairs()", "env = Stairs(); env.tower = sample.metadata['seed']; return env"
    )
    code = code.replace("{self.level}.", "{self.level}. This is tower {self.tower}.")
    assert check(write(tmp_path, code)) == 0
    shown = capsys.readouterr().out
    assert (
        "[system]\nClimb to step 3.\n\n[user]\nCurrent Observation:\nYou stand on step 0." in shown
    )
    assert "expert       3 turns, return 1, progression 1, 100% of answers valid" in shown
    assert shown.endswith("1 task: no errors, no warnings\n")


def test_with_a_tokenizer_the_prompt_is_shown_as_rendered_with_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatml_tokenizer().save_pretrained(tmp_path / "model")
    assert check(write(tmp_path), "--model", tmp_path / "model") == 0
    shown = capsys.readouterr().out
    assert (
        "<|im_start|>system\nClimb to step 3.<|im_end|>\n<|im_start|>user\nCurrent Observation:"
        in shown
    )
    assert " tokens) ---" in shown and "(about" not in shown


def test_a_budget_below_the_first_prompt_is_an_error_with_a_tokenizer_and_a_warning_with_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatml_tokenizer().save_pretrained(tmp_path / "model")
    words = ("--model", tmp_path / "model", "--no-prompt")
    assert check(write(tmp_path, memory={"kind": "notes", "budget": 9}), *words) == 1
    too_low = "memory.budget: 9 is below the first prompt, "
    assert found_in(capsys.readouterr().out)["memory"].startswith(f"error {too_low}")
    assert check(tmp_path / "stairs.yaml", "--no-prompt") == 0
    assert found_in(capsys.readouterr().out)["memory"].startswith(f"warning {too_low}about ")
    assert check(write(tmp_path, memory={"kind": "notes", "period": 4}), *words) == 0
    said = found_in(capsys.readouterr().out)["memory"]
    assert said == "warning memory.period does nothing with memory.kind: notes"


def test_the_tools_of_a_first_prompt_count_towards_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatml_tokenizer().save_pretrained(tmp_path / "model")
    tool = {
        "type": "function",
        "function": {"name": "look", "description": "Look around. " * 200, "parameters": {}},
    }
    code = GAME.replace("max_steps = 20", f"max_steps = 20; tools = [{tool!r}]")
    write(tmp_path, code, memory={"kind": "notes", "budget": 300})
    assert check(tmp_path / "stairs.yaml", "--no-prompt", "--model", tmp_path / "model") == 1
    assert "budget: 300 is below the first prompt" in capsys.readouterr().out
    flags = RolloutFlags(hf_checkpoint=str(tmp_path / "model"), rollout_max_response_len=32)
    settings = read_settings(
        RolloutSettings, yaml.safe_load((tmp_path / "stairs.yaml").read_text())
    )
    with pytest.raises(ConfigError, match="above memory.budget: 300"):
        try_each_task(settings, first_prompt_check(settings, flags))


def test_an_environment_alone_is_checked_with_its_default_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert check(tmp_path / "stairs.py", "--set", "max_turns=7") == 0
    shown = capsys.readouterr().out
    assert "task stairs" in shown
    assert found_in(shown)["ending"] == "ok limited by max_steps 20 and max_turns 7"


def test_an_environment_without_a_default_task_says_which_tasks_it_knows(tmp_path: Path) -> None:
    write(tmp_path, GAME.replace('DEFAULT_TASK = "stairs"\n', ""))
    said = error_of("check", tmp_path / "stairs.py")
    assert "unknown task 'default'; known: stairs" in said and "choose one with --task" in said


def test_every_task_of_a_yaml_is_checked_unless_one_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"task": "stairs", "name": "a"}, {"task": "stairs", "name": "b", "options": {"k": 1}}]
    path = write(tmp_path, tasks=tasks)
    assert check(path) == 0
    assert re.findall("^task (.*)$", capsys.readouterr().out, re.MULTILINE) == ["a", "b"]
    assert check(path, "--task", "b") == 0
    assert re.findall("^task (.*)$", capsys.readouterr().out, re.MULTILINE) == ["b"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--set max_turns", "--set must look like memory.n=4, got 'max_turns'"),
        ("--task stair", "unknown task 'stair'; known: stairs"),
        ("--max-turns 0", "--max-turns must be at least 1, got 0"),
        (
            "--model /nowhere",
            "no tokenizer can be loaded from the checkpoint '/nowhere': the folder does not exist",
        ),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path: Path, words: str, sentence: str) -> None:
    assert sentence in error_of("check", write(tmp_path), *words.split())


def test_a_yaml_without_tasks_is_told_so_in_terms_of_its_own_environment() -> None:
    said = error_of("check", ROOT / "custom_configs" / "geo3k.yaml")
    assert (
        "tasks is empty; name at least one task of envs.geo3k, as tasks: [NAME]" in said
        and "goto" not in said
    )
