"""Agents on templates of several families: calls in the model's own form reach every API as
structured calls."""

import os
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rollout.bridge.sample import row_of
from tests.cases import some
from tests.envs.agent.test_coding_agents import RECIPES
from tests.fixtures.families import family
from tests.fixtures.playing import playing
from tests.fixtures.scripted_engine import ScriptedEngine

RESPONSES = {
    "qwen3.5": (
        "I "
        "write.\n</think>\n\n<tool_call>\n<function=exec_command>\n<parameter=cmd>\n{cmd}\n</parameter>\n</function>\n</tool_call>",
        "So.\n</think>\n\nDone.",
    ),
    "glm-4.7": (
        "I "
        "write.</think><tool_call>exec_command<arg_key>cmd</arg_key><arg_value>{cmd}</arg_value></tool_call>",
        "So.</think>Done.",
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.exec_command:0<|tool_call_argument_begin|>"
        '{"cmd": "{cmd}"}<|tool_call_end|><|tool_calls_section_end|>',
        "Done.",
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>I write.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.exec_command <|constrain|>json<|message|>{"cmd": "{cmd}"}',
        "<|channel|>final<|message|>Done.",
    ),
}
"""A call of `exec_command`, and a last answer."""
ENDS = {"glm-4.7": ("<|observation|>", "<|user|>"), "gpt-oss": ("<|call|>", "<|return|>")}
GRADE = """
def grade(run):
    return (run.folder / "made.txt").read_text() == "fine\\n"
"""
AGENT = r"""
import http.client, json, os, sys, urllib.parse
api = sys.argv[1]
url = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
schema = {"type": "object", "properties": {"cmd": {"type": "string"}}}
def post(path, **body):
    link = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    link.request("POST", url.path + path, json.dumps({"model": "policy", **body}), key)
    return json.loads(link.getresponse().read())
say = {"role": "user", "content": "Write it."}
if api == "chat":
    tools = [{"type": "function", "function": {"name": "exec_command", "parameters": schema}}]
    message = post("/chat/completions", messages=[say], tools=tools)["choices"][0]["message"]
    call = message["tool_calls"][0]
    command = json.loads(call["function"]["arguments"])["cmd"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    post("/chat/completions", messages=[say, message, result], tools=tools)
elif api == "messages":
    tools = [{"name": "exec_command", "input_schema": schema}]
    content = post("/messages", max_tokens=99, messages=[say], tools=tools)["content"]
    call = next(part for part in content if part["type"] == "tool_use")
    command = call["input"]["cmd"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "done"}]}
    post("/messages", max_tokens=99, messages=[say, {"role": "assistant", "content": content}, result], tools=tools)
else:
    tools = [{"type": "function", "name": "exec_command", "parameters": schema}]
    output = post("/responses", input=[say], tools=tools)["output"]
    call = next(item for item in output if item["type"] == "function_call")
    command = json.loads(call["arguments"])["cmd"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    post("/responses", input=[say, *output, result], tools=tools)
os.system(command)
"""


async def play(
    folder: Path, name: str, command: list[str], **env: Any
) -> tuple[list[str], Any, dict[str, int]]:
    """Play one episode; return the prompts as text, the samples, and the counted faults."""
    tokenizer, kind = family(name), name.partition(" ")[0]
    tokenizer.save_pretrained(folder / "model")
    (folder / "work").mkdir()
    (folder / "grade.py").write_text(GRADE)
    keys = {
        "command": command,
        "workdir": str(folder / "work"),
        "grader": f"{folder}/grade.py:grade",
        **env,
    }
    answers: list[Any] = [text.replace("{cmd}", "echo fine > made.txt") for text in RESPONSES[kind]]
    if kind in ENDS:
        answers = list(zip(answers, ENDS[kind], strict=True))
    engine = ScriptedEngine(tokenizer, lambda body, number: answers[min(number, 1)])
    given = {"rollout_interaction_env_path": "envs.agent", "tasks": ["any"], "env": keys}
    limits = {"rollout_max_context_len": 100_000, "rollout_max_response_len": 500}
    async with playing(folder, engine, **given, **limits) as run:
        samples = await run.episode()
        counters = dict((await run.runtime()).counters)
    return [tokenizer.decode(body["input_ids"]) for body in engine.requests], samples, counters


CALLS = product(RESPONSES, ["chat", "messages", "responses"])
QUICK = [("qwen3.5", "chat"), ("glm-4.7", "messages"), ("kimi-k2", "responses")]


@pytest.mark.parametrize("call", some(CALLS, QUICK), ids="-".join)
async def test_a_call_in_the_familys_form_is_a_structured_call_of_the_api(
    tmp_path: Path, call: tuple[str, str]
) -> None:
    name, api = call
    (tmp_path / "agent.py").write_text(AGENT)
    command = [sys.executable, str(tmp_path / "agent.py"), api]
    prompts, samples, counters = await play(tmp_path, name, command, time_limit_s=60.0)
    assert sum(len(row_of(sample).turns) for sample in samples) == 2 and samples[-1].reward == 1.0
    # gpt-oss's template drops the reasoning of earlier responses.
    assert (len(samples), counters) == (
        (2, {"responses_rewritten": 1}) if name == "gpt-oss" else (1, {})
    )
    assert "done" in prompts[1].partition("Write it.")[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 (own template)", "glm-4.7"])
async def test_codex_runs_a_command_that_the_model_writes_in_its_own_form(
    tmp_path: Path, name: str
) -> None:
    program = shutil.which("codex")
    if program is None:
        pytest.skip("codex is not installed; docs/agents.md names its npm package")
    command = [program, *RECIPES["codex"]["command"][1:]]
    env = {
        "variables": {"PATH": os.environ["PATH"]},
        "prompt": "Write the word fine.",
        "time_limit_s": 300.0,
    }
    prompts, samples, counters = await play(tmp_path, name, command, **env)
    assert len(samples) == 1 and samples[-1].reward == 1.0, [sample.metadata for sample in samples]
    assert counters == {}
    assert "exec_command" in prompts[0] and env["prompt"] in prompts[0]
    assert "Process exited with code 0" in prompts[1]
