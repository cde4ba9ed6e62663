"""The SWE episode: tools, limits of the tools, rewards, endings."""

import shutil
from pathlib import Path

import pytest

from envs.errors import ConfigError, EpisodeOverError
from envs.swe.sandbox.workspace import Workspace, remove_tree
from envs.swe.verdict import evaluate
from tests.envs.swe.tiny_repository import DISCOUNT, ROW, WRONG, call, tiny_env

pytestmark = pytest.mark.usefixtures("few_runs")


def act(env, *answers: str) -> str:
    """Give answers one by one; return the last observation."""
    return [env.step(answer)[0]["text"]["long_term_context"] for answer in answers][-1]


def test_the_prompt_states_the_problem_the_tools_and_the_rules_but_not_the_solution() -> None:
    env = tiny_env(max_steps=9, max_calls=3)
    assert "shop/\ntests/" in env.reset()["text"]["long_term_context"]
    assert env.step("view")[0]["text"]["short_term_context"] == "Turn 2 of 9."
    prompt = env.instruction_prompt
    assert ROW["problem_statement"] in prompt and "up to 3 blocks" in prompt and "9 turns" in prompt
    for name in ("view", "search", "edit", "insert", "create", "run", "run_tests", "submit"):
        assert f'"name": "{name}"' in prompt
    assert "return sum(prices)\n" not in prompt and "test_hidden" not in prompt
    assert env.mission == ROW["problem_statement"] and env.max_steps == 9


def test_a_reader_editor_and_tester_solves_the_task_and_is_paid_once() -> None:
    env = tiny_env()
    assert "    2      return sum(prices[1:])" in act(env, call("view", path="shop/prices.py"))
    assert "shop/prices.py:2:" in act(env, call("search", pattern=r"sum\(prices"))
    assert "1 failed" in act(env, call("run_tests"))
    shown = act(
        env, call("edit", path="shop/prices.py", old="prices[1:]", new="prices") + call("run_tests")
    )
    assert "changed at line 2" in shown and "5 passed" in shown and " in 0" not in shown
    _, done, info = env.step("THINK: that is it.\nACTION: submit")
    assert done and info["terminated"] and not info["truncated"]
    assert info["reward"] == info["progression"] == 1.0 and env.verdict.solved
    assert info["metrics"] == {
        "tool_calls": 1.0,
        "tool_failures": 0.0,
        "fail_to_pass": 1.0,
        "pass_to_pass": 1.0,
    }
    with pytest.raises(EpisodeOverError):
        env.step("submit")


def test_breaking_a_green_test_costs_the_reward() -> None:
    env = tiny_env()
    act(
        env,
        call(
            "create",
            path="shop/prices.py",
            text=WRONG.replace("[1:]", "") + DISCOUNT.replace("100", "99"),
        ),
    )
    info = env.step("submit")[2]
    assert (
        info["reward"] == 0.0
        and info["metrics"]["fail_to_pass"] == 1.0
        and info["progression"] == 0.6
    )


def test_hidden_tests_and_the_solution_are_nowhere_in_the_agents_tree() -> None:
    env = tiny_env()
    shown = act(
        env,
        call(
            "run",
            command="git log --all --stat; find . -name '*hidden*'; grep -rn generators . ; ls /",
        ),
    )
    assert (
        "hidden" not in shown.replace("'*hidden*'", "").replace("grep -rn", "")
        and "judge" not in shown
    )


@pytest.mark.parametrize("judged", [True, False])
def test_running_out_of_turns_is_truncation_and_judged_only_on_request(judged: bool) -> None:
    env = tiny_env(max_steps=2, submit_on_limit=judged)
    act(env, call("edit", path="shop/prices.py", old="prices[1:]", new="prices"))
    _, done, info = env.step("view")
    assert done and info["truncated"] and not info["terminated"]
    assert info["reward"] == float(judged) and (env.verdict is not None) == judged


def test_an_answer_without_a_call_is_fined_and_the_default_is_run_instead() -> None:
    env = tiny_env()
    observation, done, info = env.step("I would look at the code first.")
    assert not done and not info["valid_action"] and info["reward"] == -0.1
    assert info["executed_action"] == env.default_action == "view ."
    assert "no tool call was found" in observation["obs_str"] and "shop/" in observation["obs_str"]
    assert tiny_env(format_penalty=0.0).step("")[2]["reward"] == 0.0


def test_calls_after_a_submit_or_past_the_limit_are_not_run() -> None:
    env = tiny_env(max_calls=2)
    assert "Only the first calls" in act(env, call("view") * 2 + call("submit"))
    _, done, info = env.step(call("submit") + call("create", path="late", text=""))
    assert done and info["valid_action"]


def test_a_command_that_hangs_or_floods_is_reported_and_the_episode_goes_on() -> None:
    env = tiny_env(command_timeout_s=3.0)
    assert "past its time limit" in act(env, call("run", command="sleep 60"))
    assert "printed too much" in act(env, call("run", command="yes"))
    env = tiny_env(tree_mb=8)
    fill = "for i in 1 2 3 4; do head -c 4000000 /dev/zero > f$i; done; sleep 5"
    assert "grew larger" in act(env, call("run", command=fill))
    assert "exit status 0" in act(env, call("run", command="rm f*; ls"))


def test_the_commands_of_one_turn_share_its_time() -> None:
    env = tiny_env(command_timeout_s=2.0, test_timeout_s=3.0)
    shown = act(env, call("run", command="sleep 60") * 3 + call("run", command="echo hello"))
    assert shown.count("past its time limit") == 2 and shown.count("is used up") == 2
    assert "hello\n" in act(env, call("run", command="echo hello"))


def test_reset_starts_over_and_close_leaves_nothing() -> None:
    env = tiny_env()
    first = env.reset()
    folder = env._workspace.folder
    act(env, call("run", command="rm -r shop; mkdir x; chmod 000 x"))
    assert env.reset() == first
    assert not folder.exists()
    folder = env._workspace.folder
    deep = "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\n"
    act(env, call("run", command=f'python -c "{deep}"'))
    env.close()
    env.close()
    assert not folder.exists()
    with pytest.raises(EpisodeOverError):
        env.step("view")


def test_an_environment_that_is_forgotten_leaves_nothing_either(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    workspace = Workspace(tmp_path / "tree")
    folder = workspace.folder
    assert folder.exists()
    del workspace
    assert not folder.exists()
    remove_tree(folder)


def test_a_very_deep_tree_and_odd_names_are_judged_like_any_other() -> None:
    env = tiny_env()
    code = "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\n"
    act(
        env,
        call(
            "run",
            command=f"python -c \"{code}\"; touch $'bad\\xff' $'line\\nbreak' -- -n; rm README.md; mkdir README.md",
        ),
    )
    act(env, call("edit", path="shop/prices.py", old="prices[1:]", new="prices"))
    assert env.step("submit")[2]["reward"] == 1.0


@pytest.mark.slow
def test_an_episode_can_be_played_again_with_the_same_outcome() -> None:
    answers = [
        "nothing",
        call("run_tests"),
        call(
            "run",
            command="python -c 'print(object(), hash(\"a\"))'; find . -name '*.py' | sort; id; pwd",
        ),
        call("search", pattern="def "),
        call("edit", path="shop/prices.py", old="prices[1:]", new="prices")
        + call("run", command="git diff"),
        "submit",
    ]
    traces = []
    for _ in range(2):
        env = tiny_env()
        trace = [env.reset()]
        traces.append(trace + [env.step(answer) for answer in answers])
    assert traces[0] == traces[1]


def test_a_python_without_pytest_is_refused_at_the_start() -> None:
    tiny_env()
    system = shutil.which("python3", path="/usr/bin")
    if system is None or Path("/usr/lib/python3/dist-packages/pytest").exists():
        pytest.skip("needs a /usr/bin/python3 without pytest")
    with pytest.raises(ConfigError, match="cannot import pytest"):
        tiny_env(python=system)


def test_hidden_tests_are_not_in_the_sandbox_while_a_probe_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, run = dict[str, str](), evaluate.run_tests

    def recorded(build, ids, settings):
        build(tree := tmp_path / "tree")
        files.update({str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*.py")})
        assert not [test for test in ids if "hidden" in test]
        return run(build, ids, settings)

    monkeypatch.setattr(evaluate, "run_tests", recorded)
    assert tiny_env().step("submit")[2]["reward"] == 0.0
    assert "tests/test_prices.py" in files and "tests/test_hidden.py" not in files
