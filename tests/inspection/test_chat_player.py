"""Players behind an OpenAI-compatible endpoint: what is sent, what is repeated, and what a refusal
costs."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import TypeAdapter

from inspection.records import read_episodes
from tests.fixtures.chat_server import KEY, ChatServer, completion, openai_error
from tests.fixtures.command import error_of
from tests.inspection.test_evaluate import evaluate, rows_of, write_config

TOO_LONG = "This model's maximum context length is 128 tokens. However, your messages resulted in 190 tokens."


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def options(server: ChatServer, folder: Path, **keys: Any) -> list[str]:
    config = write_config(
        folder, **{"tasks": ["count"], "eval": {"episodes": 3}, "n_env": 1, **keys}
    )
    return [*config, "--player", server.url, "--model", "closed-1"]


def requests(
    folder: Path, script: Any, *words: str, code: int = 0, delay_s: float = 0.0, **keys: Any
) -> list[dict[str, Any]]:
    """What an endpoint is asked in an evaluation, which ends with this exit code."""
    with ChatServer(script, delay_s) as server:
        assert evaluate(*options(server, folder, **keys), *words) == code
    return server.requests


def test_messages_are_sent_as_they_are_and_the_story_has_them(tmp_path: Path) -> None:
    words = ("--temperature", "0.5", "--max-response-len", "77")
    first = requests(tmp_path, lambda *_: "THINK: hm\nACTION: right", *words)[0]
    (row,) = rows_of(tmp_path)
    assert (row["player"], row["n"], row["valid_action_ratio"]["mean"]) == ("closed-1", 3, 1.0)
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("closed-1", 0.5, 77)
    episode = next(read_episodes(tmp_path / "out"))
    assert [episode["messages"][index] for index in episode["story"][0]["prompt"]] == first[
        "messages"
    ]
    assert episode["story"][0]["response"] == "THINK: hm\nACTION: right"
    assert KEY not in (tmp_path / "out" / "run.json").read_text() + json.dumps(episode)


def test_pictures_are_sent_as_data_uris_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    keys = {
        "rollout_interaction_env_path": "envs.babyai",
        "tasks": ["goto"],
        "env": {"vlm": True},
        "max_turns": 2,
    }
    asked = requests(tmp_path, lambda *_: "ACTION: turn left", **keys, eval={"episodes": 1})
    parts = [part for part in asked[0]["messages"][-1]["content"] if part["type"] == "image_url"]
    (episode,) = read_episodes(tmp_path / "out")
    assert parts and parts[0]["image_url"]["url"] in episode["pictures"].values()


def broken_json(*_: Any) -> web.Response:
    return web.Response(text='{"choices": [{"mess', content_type="application/json")


PASSING = {
    "rate limit": lambda *_: openai_error(
        429, "Rate limit reached", "rate_limit_exceeded", **{"Retry-After": "0.1"}
    ),
    "server error": lambda *_: web.Response(status=500, text="<html>Internal Server Error</html>"),
    "broken JSON": broken_json,
    "no choices": lambda *_: {"error": {"message": "upstream", "code": 502}},
    "wrong content": lambda *_: completion("closed-1", None, content=[{"type": "text"}]),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_is_repeated(tmp_path: Path, fault: str) -> None:
    script = lambda body, number: PASSING[fault]() if number % 3 == 1 else "ACTION: left"
    asked = len(requests(tmp_path, script))
    assert rows_of(tmp_path)[0]["n"] == 3
    turns = sum(episode["turns"] for episode in read_episodes(tmp_path / "out"))
    assert asked == turns + sum(number % 3 == 1 for number in range(asked))


def test_a_fault_that_stays_ends_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    down = [True]
    script = lambda body, number: (
        PASSING["server error"]() if down[0] and number >= 20 else "ACTION: left"
    )
    with ChatServer(script) as server:
        given = options(server, tmp_path, eval={"episodes": 8})
        said = error_of("evaluate", *given)
        assert (
            "/chat/completions failed 2 times; last: " in said and " of 8 episodes are in" in said
        )
        kept = len(list(read_episodes(tmp_path / "out")))
        down[0] = False
        assert 0 < kept < 8 and evaluate(*given) == 0
    assert rows_of(tmp_path)[0]["n"] == 8


def test_a_slow_endpoint_is_asked_again_after_the_timeout_and_then_given_up(tmp_path: Path) -> None:
    quick = {"timeout_s": 0.3, "max_retries": 1, "backoff_s": 0.01}
    with ChatServer(lambda *_: "ACTION: left", delay_s=2.0) as server:
        said = error_of("evaluate", *options(server, tmp_path, engine=quick))
    assert "failed 2 times; last: no answer within engine.timeout_s: 0.3" in said


def test_a_wrong_key_ends_the_run_at_once_in_the_servers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChatServer(lambda *_: "ACTION: left") as server:
        given = ["evaluate", *options(server, tmp_path), "--api-key-env", "OTHER_KEY"]
        monkeypatch.setenv("OTHER_KEY", "sk-wrong")
        assert "HTTP 401: Incorrect API key provided." in error_of(*given)
        monkeypatch.delenv("OTHER_KEY")
        assert "(no key was sent: OTHER_KEY is not set)" in error_of(*given)


def test_a_prompt_over_the_context_ends_its_episode_as_such(tmp_path: Path) -> None:
    refusal = lambda: openai_error(400, TOO_LONG, "context_length_exceeded")
    script = lambda body, number: refusal() if number == 2 else "ACTION: left"
    requests(tmp_path, script, env={"length_of": "tests.inspection.test_chat_player.six"})
    (row,) = rows_of(tmp_path)
    assert (row["n"], row["failed"], row["context"]) == (3, 0, 1)
    assert [episode["turns"] for episode in read_episodes(tmp_path / "out")] == [2, 6, 6]


def six(_seed: int) -> int:
    return 6


def test_a_refused_prompt_costs_one_episode_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = lambda: openai_error(400, "Your prompt was flagged.", "content_policy")
    script = lambda body, number: refusal() if number == 0 else "ACTION: left"
    requests(tmp_path, script, code=1)
    assert rows_of(tmp_path)[0]["failed"] == 1
    error = capsys.readouterr().err
    assert (
        "the first fault: task count, seed 1000000000: " in error
        and "HTTP 400: Your prompt was flagged." in error
    )


def test_newer_models_get_the_length_under_its_other_name(tmp_path: Path) -> None:
    words = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    script = lambda body, number: (
        openai_error(400, words) if "max_tokens" in body else "ACTION: left"
    )
    asked = requests(tmp_path, script, delay_s=0.2, n_env=3)
    assert [("max_tokens" in body) for body in asked].count(True) == 3, (
        "the first request of each episode"
    )


def call(arguments: str) -> dict[str, Any]:
    return {
        "id": "call_add",
        "type": "function",
        "function": {"name": "add", "arguments": arguments},
    }


def test_tools_are_called_in_the_endpoints_own_form(tmp_path: Path) -> None:
    """Two calls at once, arguments that are no JSON, and an answer; the messages are those of
    OpenAI's client."""
    types: Any = pytest.importorskip("openai.types.chat", reason="needs pip install openai")

    def script(body: dict[str, Any], number: int) -> Any:
        calls = [[call('{"a": 2, "b": 3}'), call('{"a": 4}')], [call('{"a": ')], []]
        return completion(
            "closed-1", ["Let me see.", None, "The sum is 5."][number], tool_calls=calls[number]
        )

    tools = {
        "tools": "tests.envs.tools.toolbox:add",
        "data": [{"question": "What is 2 + 3?", "answer": "5"}],
    }
    keys = {
        "rollout_interaction_env_path": "envs.tools",
        "tasks": ["sums"],
        "history": "full",
        "env": tools,
    }
    asked = requests(tmp_path, script, **keys, eval={"episodes": 1})
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["add"]
    message = TypeAdapter(types.ChatCompletionMessageParam)
    sent = [[message.validate_python(item) for item in request["messages"]] for request in asked]
    said, *results = asked[1]["messages"][-3:]
    assert said["content"] == "Let me see." and [result["content"] for result in results] == [
        "5",
        "4",
    ]
    assert [c["function"]["arguments"] for c in said["tool_calls"]] == [
        '{"a": 2, "b": 3}',
        '{"a": 4}',
    ]
    assert "No tool was run" in asked[2]["messages"][-1]["content"] and len(sent) == 3
    (episode,) = read_episodes(tmp_path / "out")
    assert (
        episode["turns"] == 3
        and episode["metrics"]["tool_calls"] == 2.0
        and episode["stop"] == "terminated"
    )
    assert episode["usage"] == {
        "answers": 3,
        "empty": 0,
        "prompt_tokens": 27,
        "completion_tokens": 9,
    }
    assert (
        "answered 3 times, read 27 and wrote 9 tokens." in (tmp_path / "out/table.md").read_text()
    )
