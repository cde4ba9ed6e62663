"""Agents through the rollouts: every request is a sample, whatever the agent does with its
history."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.bridge.sample import row_of
from rollout.errors import FailureBudgetError
from rollout.fixed_turn import collect, open_slots
from rollout.turn import StopReason
from tests.cases import some
from tests.envs.agent.test_agent import options
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.families import family
from tests.fixtures.messages import answer, system, user
from tests.fixtures.playing import one_slot, playing
from tests.fixtures.scripted_engine import ScriptedEngine

TWO_WORKERS: dict[str, Any] = {
    "rollout_batch_size": 8,
    "n_env": 2,
    "env_backend": "process",
    "env_workers": 2,
}


def numbered(body: dict[str, Any], number: int) -> str:
    return f"answer {number}"


def agent(mode: str, *, keys: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Settings of a run of this agent."""
    return {
        "rollout_interaction_env_path": "envs.agent",
        "tasks": ["any"],
        "env": options(mode, **(keys or {})),
        **more,
    }


async def play(folder: Path, mode: str, script: Any = numbered) -> tuple[Any, list[dict[str, Any]]]:
    """A whole episode, and its requests; nothing unusual was counted."""
    async with playing(folder, script, **agent(mode)) as run:
        samples = await run.episode()
        assert not (await run.runtime()).counters
    return samples, run.engine.requests


def turns_in(samples: list[Any]) -> int:
    return sum(len(row_of(sample).turns) for sample in samples)


async def test_an_agent_that_edits_its_history_is_trained_on_every_token_that_it_got(
    tmp_path: Path,
) -> None:
    """slime's own adapter trains 8 of these 24 tokens: tests/slime/test_agents.py."""
    tokenizer = chatml_tokenizer()
    samples, requests = await play(
        tmp_path, "edits", lambda body, number: tokenizer.decode([10 + number] * 7)
    )
    assert len(samples) == 3 and sum(sum(turn.loss_mask) for turn in samples) == 3 * 8
    for turn, request in zip(samples, requests, strict=True):
        assert turn.tokens[: -turn.response_length] == request["input_ids"], (
            "trained on the prompt that was asked"
        )
    last = tokenizer.decode(requests[2]["input_ids"])
    expected = [system("Be brief."), user("question 0")]
    for number in (1, 2):
        expected += [answer("(left out)"), user(f"question {number}")]
    assert last == template(expected)


def template(messages: list[dict[str, Any]]) -> str:
    """The chat template's prompt for an answer to the messages."""
    return chatml_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


async def test_an_agent_may_ask_for_an_answer_to_an_answer(tmp_path: Path) -> None:
    """No one-shot encoding exists for such a prompt, so there is nothing to compare it with."""
    samples, requests = await play(tmp_path, "hands_over")
    assert turns_in(samples) == 2 and samples[-1].reward == 1.0
    said = [user("Go."), answer("An example.")]
    for number, request in enumerate(requests):
        assert chatml_tokenizer().decode(request["input_ids"]) == template(said)
        said.append(answer(f"answer {number}"))


async def test_the_edge_out_of_an_agents_own_summary_carries_no_step_discount(
    tmp_path: Path,
) -> None:
    samples, _ = await play(tmp_path, "compacts")
    assert [row_of(part).turns[0].moves for part in samples] == [True, False, True]


async def test_a_fixed_turn_batch_holds_the_request_of_an_agent_until_the_next_batch(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, numbered, **agent("edits 5", **TWO_WORKERS)) as run:
        first = await collect(run.args, 0, run.source)
        waiting = [
            list(s.bootstrap.token_ids)
            for s in first.segments
            if s.stop is StopReason.CUT and s.bootstrap
        ]
        second = await collect(run.args, 1, run.source)
    played = [list(s.turns[0].prompt.token_ids) for s in second.segments if s.turns[0].index]
    assert waiting and sorted(played) == sorted(waiting), (
        "the value of a cut is that of the next request"
    )
    segments = [*first.segments, *second.segments]
    assert sum(len(s.turns) for s in segments) == 16 and any(
        s.stop is StopReason.TERMINATED for s in segments
    )
    assert first.metrics.get("rollout/faults/episodes_failed", 0.0) == 0.0


@pytest.mark.parametrize(
    ("mode", "keys", "stop", "bootstrapped"),
    [
        ("edits 3", {"max_steps": 2}, StopReason.TIME_LIMIT, True),
        (
            "hangs",
            {"time_limit_s": 2.0, "variables": {"MARK": "/dev/null"}},
            StopReason.TIME_LIMIT,
            False,
        ),
        ("crashes", {}, StopReason.TERMINATED, False),
    ],
)
async def test_after_a_limit_the_value_of_the_next_request_stands_in_for_the_rest_if_there_is_one(
    tmp_path: Path, mode: str, keys: dict[str, Any], stop: StopReason, bootstrapped: bool
) -> None:
    settings = agent(mode, keys=keys, bootstrap_on_time_limit=True, **one_slot(2))
    async with playing(tmp_path, numbered, **settings) as run:
        batch = await collect(run.args, 0, run.source)
    ended = [segment for segment in batch.segments if segment.stop is not StopReason.CUT]
    assert {segment.stop for segment in ended} == {stop}
    assert all((segment.bootstrap is not None) is bootstrapped for segment in ended)


async def test_a_resumed_run_gives_up_the_episodes_of_agents(tmp_path: Path) -> None:
    async with playing(tmp_path, numbered, **agent("edits")) as run:
        runtime, source = await run.runtime(), run.source
        await open_slots(runtime, source)
        episode = await source.slots[0].live()
        await episode.step(await episode.generate(runtime.flags.sampling_params()))
        resumed = type(source)(run.args)
        resumed.saved_slots = source.state().slots
        await open_slots(runtime, resumed)
        slot = resumed.slots[0]
        assert slot.episode is None and runtime.counters["episodes_lost_at_resume"] == 1
        assert (await slot.live()).index == 0, "the slot goes on with the next episode"


async def test_history_full_is_refused(tmp_path: Path) -> None:
    settings = agent("edits", history="full", max_episode_failures_per_batch=0)
    async with playing(tmp_path, numbered, **settings) as run:
        with pytest.raises(FailureBudgetError, match="leave history out of the YAML"):
            await run.batch()


CODEX = r"""
import http.client, json, os, urllib.parse
url = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
def post(body):
    link = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    link.request("POST", url.path + "/responses", json.dumps(body), key)
    return json.loads(link.getresponse().read())
def part(role, text):
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
items = [part("developer", "You are a coding agent."), part("developer", "permissions"), part("user", "say hi")]
answer = post({"model": "policy", "instructions": "", "store": False, "input": items})
items += [*answer["output"], part("developer", "reminder: a file changed"), part("user", "go on")]
post({"model": "policy", "instructions": "", "store": False, "input": items})
"""
"""Asks as Codex does: with two developer messages at the start, and a later one."""


TEMPLATES = ["qwen3.5", "qwen3.5 (own template)", "mistral-nemo", "gpt-oss", "glm-4.7"]


@pytest.mark.parametrize("name", some(TEMPLATES, ["qwen3.5"]))
async def test_an_agent_with_several_system_messages_plays_on_every_template(
    tmp_path: Path, name: str
) -> None:
    tokenizer = family(name)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "agent.py").write_text(CODEX)
    env = {"command": [sys.executable, "agent.py"], "workdir": str(tmp_path), "time_limit_s": 60.0}
    given = {**agent("edits"), "env": env}
    thinks = {"qwen3.5": "so\n</think>\n\n", "glm-4.7": "so</think>"}.get(name.split(" ")[0], "")
    start = "<|channel|>final<|message|>" if name == "gpt-oss" else thinks
    engine = ScriptedEngine(tokenizer, lambda body, number: f"{start}hello")
    async with playing(tmp_path, engine, **given) as run:
        samples = await run.episode()
        # glm's template writes no token where this response ended.
        assert (await run.runtime()).counters == (
            {"responses_rewritten": 1} if name == "glm-4.7" else {}
        )
    assert turns_in(samples) == 2 and samples[-1].reward == 1.0
    prompts = [tokenizer.decode(body["input_ids"]) for body in engine.requests]
    assert all(
        prompts[0].count(text) == 1 for text in ("You are a coding agent.", "permissions", "say hi")
    )
    assert prompts[1].count("reminder: a file changed") == 1 and prompts[1].count("hello") == 1
