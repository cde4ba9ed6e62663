"""Agents as black boxes, played with real programs: turns, endings, bad programs, and what is left
running."""

import base64
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from envs.agent import AgentEnv, AgentRun, anthropic_format, openai_format, session
from envs.agent.request import Request, read_response, with_images
from envs.errors import ConfigError, EnvironmentFault, EpisodeOverError
from envs.loading import build_env_from
from rollout.workers.guard import descendants
from tests.envs.tools.test_tool_env import call
from tests.fixtures.waiting import until
from tests.rollout.workers.test_env_pool import is_alive

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
PROGRAM = FIXTURES / "agent_program.py"


Start = Callable[..., AgentEnv]


def options(mode: str, **more: Any) -> dict[str, Any]:
    return {"command": f"{sys.executable} {PROGRAM} {mode}", **more}


def built(**keys: Any) -> AgentEnv:
    return build_env_from("envs.agent", {"task": "any", "seed": 3}, keys)


def made(mode: str, **more: Any) -> AgentEnv:
    return built(**options(mode, **more))


@pytest.fixture
def started() -> Iterator[Start]:
    envs: list[AgentEnv] = []

    def start(mode: str, **more: Any) -> AgentEnv:
        envs.append(made(mode, **more))
        envs[-1].reset()
        return envs[-1]

    yield start
    for env in envs:
        env.close()


def shown(env: AgentEnv) -> list[dict[str, Any]]:
    """The messages of the request that waits."""
    return env.format_observation({"obs_str": "", "text": {}})


def texts(env: AgentEnv) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in shown(env)]


def grade(run: AgentRun) -> float:
    """A grader: half a point for each of the model's answers that the agent kept."""
    return 0.5 * sum(
        role == "assistant" for role, _ in json.loads((run.folder / "answers.json").read_text())
    )


def printed_its_question(run: AgentRun) -> float:
    """A grader: whether the program's output is what it asked."""
    return float(run.output.strip() == run.messages[0]["content"] and run.exit_code is None)


def test_each_request_is_an_observation_exactly_as_sent_and_the_grader_pays_the_last_turn(
    started: Start,
) -> None:
    env = started("edits 2", grader="tests.envs.agent.test_agent:grade")
    folder = env.run.folder
    assert texts(env) == [("system", "Be brief."), ("user", "question 0")]
    observation, done, info = env.step("<think>hm</think>one")
    assert (done, info["reward"], observation["obs_str"]) == (False, 0.0, "question 1")
    assert texts(env)[2] == ("assistant", "(left out)"), "the agent rewrote the answer"
    _, done, info = env.step("two")
    assert done and info["terminated"] and info["reward"] == 1.0 and info["progression"] == 1.0
    assert shown(env) == [] and not folder.exists()
    with pytest.raises(EpisodeOverError):
        env.step("three")


def test_the_documented_grader_prepares_the_task_and_grades_it(
    started: Start, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    code, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_grader.py").write_text(code)
    keys = {
        "prepare": f"{tmp_path}/my_grader.py:prepare",
        "grader": f"{tmp_path}/my_grader.py:grade",
    }
    env = started("sums", **keys)
    assert texts(env) == [("user", "Write the sum of the numbers in numbers.txt to sum.txt. 3 4")]
    assert env.step("7")[2]["reward"] == 1.0
    env.reset()
    assert env.step("8")[2]["reward"] == 0.0


def test_a_grader_reads_text_of_plain_files_in_the_folder_only(tmp_path: Path) -> None:
    run = AgentRun("any", 0, "", tmp_path / "work")
    run.folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (run.folder / "answer").write_bytes(b"7\xff")
    (run.folder / "link").symlink_to("answer")
    (run.folder / "out").symlink_to(tmp_path)
    assert run.read_text("answer") == "7\ufffd"
    for name in ("link", "out/secret", "../secret", "missing", ".", "null\0"):
        assert run.read_text(name) == "", name


def test_a_score_that_is_not_a_number_is_a_fault_that_names_the_grader(started: Start) -> None:
    grader = "tests.envs.agent.test_agent:words_as_score"
    env = started("asks 1", grader=grader)
    with pytest.raises(
        EnvironmentFault, match=f"env.grader {grader} returned 'good', not a number"
    ):
        env.step("yes")


async def words_as_score(run: AgentRun) -> str:
    return "good"


@pytest.mark.parametrize(
    ("prompt", "mission"), [("Add.", "Add."), ("", "Well?")], ids=["prompt", "first request"]
)
def test_a_judge_is_told_the_task_of_an_agent(started: Start, prompt: str, mission: str) -> None:
    assert started("asks 1", prompt=prompt).mission == mission


def test_an_agent_works_in_a_copy_of_a_read_only_folder_and_gets_its_own_options(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o555)
    keys = {"workdir": str(tmp_path), "options": {"left": [1, 2]}}
    env = made("asks 1", prepare="tests.envs.agent.test_agent:takes_one", **keys)
    for _ in range(2):
        env.reset()
        assert env.run.folder.stat().st_mode & 0o700 == 0o700
        assert env.run.options == {"left": [1]}
    env.close()


def takes_one(run: AgentRun) -> None:
    run.options["left"].pop()


def test_a_folder_that_cannot_be_copied_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="env.workdir: .*pipe cannot be copied: .*named pipe"):
        made("asks 1", workdir=str(tmp_path)).reset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("add", a=1), ("", ["add"], True)),
        (
            "<tool_call><function=add><parameter=a>7</parameter></function></tool_call>",
            ("", ["add"], True),
        ),
        ("<tool_call>oops</tool_call>", ("<tool_call>oops</tool_call>", [], False)),
        ("Thought: stop here\nObservation: invented", ("Thought: stop here", [], True)),
        ("<think>never ends", ("", [], True)),
        ("half \ud800", ("half ?", [], True)),
    ],
)
def test_an_answer_is_split_as_a_server_would_split_it(
    text: str, expected: tuple[str, list[str], bool]
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = ({"type": "function", "function": {"name": "add", "parameters": parameters}},)
    answer = read_response(text, Request((), tools, stops=("\nObservation:",)), 4)
    assert (answer.text, [c.name for c in answer.calls], not answer.errors) == expected
    assert all(type(value) is int for c in answer.calls for value in c.arguments.values())


def test_an_empty_stop_text_stops_nothing() -> None:
    """Found in every text at once, it would leave nothing of any response."""
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "Well?"}],
        "stop": ["", "END"],
    }
    assert read_response("one END", openai_format.read(body), 4).text == "one"


def test_both_apis_send_pictures_into_the_prompt() -> None:
    file = io.BytesIO()
    Image.new("RGB", (28, 20), "red").save(file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    text = {"type": "text", "text": "What is this?"}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    for read, picture in (
        (openai_format.read, url),
        (anthropic_format.read, {"type": "image", "source": source}),
    ):
        request = read(
            {"model": "policy", "messages": [{"role": "user", "content": [text, picture]}]}
        )
        shown, image = with_images(request.messages)[0]["content"]
        assert (
            shown == text
            and image["type"] == "image"
            and image["image"].getpixel((5, 5)) == (255, 0, 0)
        )


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("quits", "never asked the model: it ended with exit code 0; its last line: nothing to do"),
        ("sleeps", "never asked the model: it did not ask within 1 s"),
        (
            "other",
            "exit code 3.*its last request was refused: there is no model 'gpt-9' here, only "
            "policy",
        ),
        ("floods", "sent 20 requests that were refused, the last one because there is no model"),
    ],
)
def test_a_program_that_never_asks_properly_is_one_sentence(
    mode: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_REFUSED", 20)
    others = set(psutil.Process().children())
    env = made(mode, time_limit_s=1.0 if mode == "sleeps" else 30.0)
    with pytest.raises(EnvironmentFault, match=words):
        env.reset()
    assert set(psutil.Process().children()) <= others


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("a" * 140_000, "AGENT_PROMPT has 140000 bytes"),
        ("a\0b", "AGENT_PROMPT holds a null character"),
        ("a\ud800b", "AGENT_PROMPT holds half of a surrogate pair"),
    ],
    ids=["long", "null", "surrogate"],
)
def test_a_prompt_that_no_program_can_be_given_is_one_sentence(prompt: str, words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        made("quits", prompt=prompt).reset()


def test_the_name_of_a_variable_is_checked_before_the_start() -> None:
    with pytest.raises(ConfigError, match="env.variables: 'A=B' cannot be a variable's name"):
        made("quits", variables={"A=B": "x"})


def test_a_request_that_cannot_be_encoded_is_refused_and_the_agent_goes_on(started: Start) -> None:
    env = started("unreadable")
    assert texts(env) == [("user", "fine")]
    _, done, info = env.step("ok")
    assert done and info["metrics"]["refused"] == 3 and info["reward"] == 1.0


def test_a_program_that_fails_while_it_waits_is_a_fault(started: Start) -> None:
    env = started("impatient")
    until(lambda: env._episode.session.end is not None)
    with pytest.raises(
        EnvironmentFault,
        match="while it waited for the model, .* give its client a longer time limit",
    ):
        env.step("late")


def test_a_program_that_has_given_up_waiting_and_fails_later_is_a_fault_as_well(
    started: Start, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    env = started("gives_up", variables={"MARK": str(mark)})
    until(mark.exists)
    with pytest.raises(
        EnvironmentFault, match="while it waited for the model, the agent ended with exit code 1"
    ):
        env.step("late")


def test_a_program_that_a_response_makes_fail_while_another_part_of_it_waits_has_played_its_episode(
    started: Start,
) -> None:
    env = started("crashes_beside")
    until(lambda: env._episode.session._queue)
    assert not env.step("x")[1], "the other request is waiting"
    until(lambda: env._episode.session.end is not None)
    _, done, info = env.step("late")
    assert (
        done and info["terminated"] and info["reward"] == 0.0 and info["metrics"]["exit_code"] == 1
    )


def test_the_work_at_a_limit_is_graded_with_the_output_and_temporary_files_are_removed(
    started: Start,
) -> None:
    keys = {"grade_at_limit": True, "grader": "tests.envs.agent.test_agent:printed_its_question"}
    env = started("litters", time_limit_s=2.0, **keys)
    file = Path(texts(env)[0][1])
    assert file.exists()
    _, done, info = env.step("x")
    assert done and info["truncated"] and info["reward"] == 1.0
    assert not file.exists()


def test_a_program_that_does_not_ask_again_is_truncated_without_a_next_prompt_and_its_processes_end(
    started: Start, tmp_path: Path
) -> None:
    others = descendants(psutil.Process().pid)
    env = started("hangs", time_limit_s=2.0, variables={"MARK": str(tmp_path / "mark")})
    before = set(descendants(psutil.Process().pid)) - set(others)
    _, done, info = env.step("x")
    assert done and info["truncated"] and not info["terminated"] and shown(env) == []
    assert (tmp_path / "mark").exists() and before and not any(map(is_alive, before))


def test_a_request_that_is_sent_again_gets_the_answer_of_the_first(started: Start) -> None:
    env = started("retries")
    assert texts(env) == [("user", "Well?")]
    until(lambda: env._episode.session.counts["retries"])  # the client has given up and asked again
    _, done, info = env.step("late")
    assert not done and texts(env) == [("user", "And now?")] and info["metrics"]["retries"] == 1
    _, done, info = env.step("good")
    assert done and info["metrics"]["lost_answers"] == 0


def test_equal_requests_at_the_same_time_that_are_sent_again_get_a_response_each(
    started: Start,
) -> None:
    env = started("votes")
    until(lambda: env._episode.session._queue)
    (env.run.folder / "late").touch()
    until(lambda: env._episode.session.counts["retries"] and env._episode.session._queue)
    assert not env.step("yes")[1]
    _, done, info = env.step("no")
    assert done and info["reward"] == 1.0 and info["metrics"]["retries"] == 1


def test_a_request_that_only_summarises_the_conversation_moves_nothing(started: Start) -> None:
    env, moves, done = started("compacts"), [], False
    while not done:
        _, done, info = env.step("a door")
        moves.append(info["moves"])
    assert moves == [True, False, True]


def test_requests_at_the_same_time_are_turns_one_after_the_other_with_the_number_of_their_part(
    started: Start,
) -> None:
    env, seen, done, info = started("parallel"), [], False, {}
    while not done:
        question = texts(env)[-1][1]
        _, done, info = env.step(f"to {question}")
        seen.append((question, info["metrics"]["thread"]))
    assert (
        sorted(text for text, _ in seen) == ["A 0", "A 1", "B 0", "B 1"] and info["reward"] == 1.0
    )
    assert {text[0]: thread for text, thread in seen}.keys() == {"A", "B"} and info["metrics"][
        "threads"
    ] == 2
