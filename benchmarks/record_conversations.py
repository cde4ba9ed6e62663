"""Records one conversation of each program, with a script in the model's place; see
`benchmarks/conversations.py`.

The programs run without the sandbox, because the script's commands are harmless.
"""

import asyncio
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from envs.agent.continued import Continued
from envs.agent.parts import Message
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.sample import flatten, row_of
from rollout.data_source import EpisodeSource
from rollout.generate import generate
from rollout.play.runtime import close_runtimes, get_runtime
from tests.envs.agent.test_coding_agents import RECIPES
from tests.fixtures.families import family
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine

FAMILY = "qwen3.5 (own template)"
FILES = 16
"""Files that the script writes and corrects, with six requests for each."""
TASK = "Write small modules with a test for each, and make the tests pass. The folder is {folder} ."
LIMITS = {"rollout_max_context_len": 200_000, "rollout_max_response_len": 2_000}
CODE = "def total(prices):\n    found = 0\n    for price in prices[1:]:\n        found += price\n    return found\n"
WRONG = "prices[1:]:"
RIGHT = "prices:"


def call(name: str, **arguments: Any) -> str:
    """A call in the form of Qwen3.5's template."""
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def codex(path: str) -> list[str]:
    """Codex reads and edits by commands."""
    patched = f"*** Begin Patch\n*** Update File: {path}\n@@\n-    for price in {WRONG}\n+    for price in {RIGHT}\n"
    edit = f"apply_patch <<'END'\n{patched}*** End Patch\nEND"
    commands = [f"cat > {path} <<'END'\n{CODE}END", f"cat {path}", edit, f"grep -n price {path}"]
    return [call("exec_command", cmd=command) for command in [*commands, *_checks(path)]]


def claude(path: str) -> list[str]:
    """Claude Code's own tools."""
    edit = call("Edit", file_path=path, old_string=WRONG, new_string=RIGHT)
    calls = [call("Write", file_path=path, content=CODE), call("Read", file_path=path), edit]
    calls.append(call("Read", file_path=path, offset=2, limit=3))
    return [
        *calls,
        *(call("Bash", command=command, description="Check") for command in _checks(path)),
    ]


def qwen(path: str) -> list[str]:
    """Qwen Code's own tools."""
    edit = call("edit", file_path=path, old_string=WRONG, new_string=RIGHT)
    calls = [
        call("write_file", file_path=path, content=CODE),
        call("read_file", file_path=path),
        edit,
    ]
    calls.append(call("grep_search", pattern="price", path=str(Path(path).parent)))
    return [
        *calls,
        *(
            call("run_shell_command", command=command, is_background="false")
            for command in _checks(path)
        ),
    ]


def _checks(path: str) -> list[str]:
    name = Path(path).stem
    return [
        f"cd {Path(path).parent} && python3 -c 'import {name}; print({name}.total([1, 2]))'",
        f"wc -l {path}",
    ]


CALLS = {"codex": codex, "claude": claude, "qwen": qwen}


class Engine(ScriptedEngine):
    """Keeps the responses' token ids beside the requests."""

    def __init__(self, tokenizer: Any, program: str) -> None:
        super().__init__(tokenizer, self._respond)
        self.program = program
        self.responses: list[list[int]] = []
        self._turns = 0

    def answer(self, *given: Any, **named: Any) -> dict[str, Any]:
        answer = super().answer(*given, **named)
        self.responses.append(
            [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
        )
        return answer

    def _respond(self, body: dict[str, Any], number: int) -> str:
        if self.program == "babyai":
            return f"Turn {number}: I look around.\n</think>\n\nACTION: {('turn left', 'turn right')[number % 2]}"
        prompt = self.tokenizer.decode(body["input_ids"])
        folder = re.search(r"The folder is (\S+) \.", prompt)
        if folder is None or "<tools>" not in prompt:
            return "A title.\n</think>\n\nSmall modules"
        calls = CALLS[self.program](f"{folder[1]}/module_{self._turns // 6}.py")
        self._turns += 1
        if self._turns > 6 * FILES:
            return "All tests pass.\n</think>\n\nDone."
        step = (self._turns - 1) % 6
        said = "I correct the loop.\n\n" if step == 2 else ""
        return (
            f"Step {self._turns}: the next thing to do is clear.\n</think>\n\n{said}{calls[step]}"
        )


class Sent(Continued):
    """Notes the messages as the program sent them."""

    sent: list[list[Message]]
    answers: list[Message]

    def show(self, messages: Sequence[Message], decode: Any) -> Any:
        self.sent.append([_plain(message) for message in messages])
        return super().show(messages, decode)

    def answered(self, response: Message, spelled: Message | None = None) -> None:
        self.answers.append(_plain(response))
        super().answered(response, spelled)


def _plain(message: Message) -> Message:
    """A message without the ids of its calls, which slime's adapters drop too."""
    kept = {
        name: message[name]
        for name in ("role", "content", "reasoning_content")
        if message.get(name)
    }
    if message.get("tool_calls"):
        kept["tool_calls"] = [dict(call["function"]) for call in message["tool_calls"]]
    return kept


def keys_of(program: str) -> dict[str, Any]:
    """The YAML keys of an episode."""
    if program == "babyai":
        game = {"rollout_interaction_env_path": "envs.babyai", "tasks": ["goto"]}
        return {**game, "env": {"max_steps": 100}, "history": "full"}
    found = shutil.which(program)
    if found is None:
        raise SystemExit(f"{program} is not on PATH; docs/agents.md names its npm package")
    words = [found, *(word.replace("{prompt}", TASK) for word in RECIPES[program]["command"][1:])]
    # Lets Claude Code run as root.
    variables = {**RECIPES[program].get("variables", {}), "IS_SANDBOX": "1"}
    limits = {"max_steps": 200, "time_limit_s": 3000.0, "pass_env": ["PATH"]}
    keys = {**RECIPES[program], "command": words, "variables": variables, **limits}
    return {"rollout_interaction_env_path": "envs.agent", "tasks": ["any"], "env": keys}


async def record(program: str, folder: Path, **more: Any) -> list[dict[str, Any]]:
    """Play one episode and return its turns; prints the lengths of its samples, and what the run
    counted."""
    tokenizer = family(FAMILY)
    tokenizer.save_pretrained(folder / "checkpoint")
    Sent.sent = []
    Sent.answers = []
    times = {"env_step_timeout_s": 4000.0, "env_reset_timeout_s": 4000.0}
    async with Engine(tokenizer, program) as engine:
        keys = {
            **keys_of(program),
            "hf_checkpoint": str(folder / "checkpoint"),
            **LIMITS,
            **times,
            **more,
        }
        args = rollout_args(folder, engine.port, **keys)
        sample = EpisodeSource(args).get_samples(1)[0][0]
        try:
            with patch("envs.agent.Continued", Sent):
                samples = flatten(
                    [await generate(args, sample, RolloutFlags.read(args).sampling_params())]
                )
            counters = dict((await get_runtime(args)).counters)
        finally:
            await close_runtimes()
    facts = samples[-1].metadata
    if fault := facts.get("fault"):
        raise SystemExit(f"{program}: {fault}")
    turns = [len(row.turns) for row in map(row_of, samples) if row is not None]
    lengths = [len(sample.tokens) for sample in samples]
    print(program, "turns", turns, "tokens", lengths, counters, facts["stop"], file=sys.stderr)
    prompts = [body["input_ids"] for body in engine.requests]
    if program == "babyai":
        Sent.sent = [_messages(tokenizer, prompt)[:-1] for prompt in prompts]
        whole = (
            prompt + response for prompt, response in zip(prompts, engine.responses, strict=True)
        )
        Sent.answers = [_messages(tokenizer, tokens)[-1] for tokens in whole]
    columns = prompts, engine.responses, Sent.sent[: len(prompts)], Sent.answers
    names = "prompt", "response", "messages", "answer"
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _messages(tokenizer: Any, tokens: Sequence[int]) -> list[Message]:
    """The messages of a game's prompt, from its text."""
    parts = tokenizer.decode(tokens).split("<|im_start|>")[1:]
    return [
        dict(zip(("role", "content"), part.strip().split("\n", 1), strict=False)) for part in parts
    ]


def main() -> None:
    """Write a recording for each program of the command line, by default all."""
    out, *programs = sys.argv[1:]
    for program in programs or [*CALLS, "babyai"]:
        with tempfile.TemporaryDirectory() as folder:
            turns = asyncio.run(record(program, Path(folder)))
        Path(out).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(turn) + "\n" for turn in turns)
        (Path(out) / f"{program}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
