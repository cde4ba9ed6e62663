"""Agents as black boxes: any program that asks a model over HTTP is played and trained; each
request is one turn.

Invariants: every request that is shown is one turn, and its prompt is the request's messages and
tools. The program is alive only during its episode. The reward comes from the grader, once, after
the program has ended.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs import base
from envs.agent.continued import Continued
from envs.agent.parts import Message
from envs.agent.program import (
    Program,
    addresses,
    check_words,
    find_program,
    search_path,
    start_plain,
    start_sandboxed,
)
from envs.agent.request import Response, assistant_message, read_response, with_images
from envs.agent.server import ModelServer, model_server
from envs.agent.session import End, Session, Waiting
from envs.agent.settings import AgentSettings
from envs.base import BaseInteractionEnv, Observation, StepInfo
from envs.errors import ConfigError, EnvironmentFault, EpisodeOverError, ToolError
from envs.json_text import short
from envs.loading import load_attribute, split_command
from envs.swe.sandbox.sandbox import Sandbox, check_sandbox
from envs.swe.sandbox.workspace import hand_over, read_plain, remove_tree
from envs.tools.execution import ToolTimeout, run_bounded
from envs.tools.results import finite

SETTINGS = AgentSettings
MAX_TEXT_BYTES = 1 << 20
"""A grader reads this much of a file."""


@dataclass(frozen=True)
class AgentRun:
    """One run of the agent, for `prepare` (before its start) and for the grader (after its end)."""

    task: str
    seed: int
    prompt: str
    folder: Path
    """The episode's copy of `workdir`, in which the program runs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The YAML's `env.options`."""
    exit_code: int | None = None
    """None if `max_steps` or `time_limit_s` ended the episode."""
    output: str = ""
    """Beginning and end of what the program wrote to stdout and stderr."""
    turns: int = 0
    messages: tuple[Message, ...] = ()
    """The last request that the model answered."""
    answer: str = ""
    """The model's last answer."""

    def read_text(self, name: str) -> str:
        """Text of a file in `folder`, at most 1 MiB; empty if there is none.

        Links are not followed, and what is not UTF-8 is replaced.
        """
        path = self.folder / name
        data = None
        with contextlib.suppress(OSError, ValueError):
            if path.parent.resolve().is_relative_to(self.folder.resolve()):
                data = read_plain(path, MAX_TEXT_BYTES)
        return (data or b"").decode(errors="replace")


class AgentEnv(BaseInteractionEnv):
    """One run of an agent's program."""

    default_action = "the answer as text"
    deterministic = False
    whole_prompts = True

    def __init__(self, task: str, seed: int, settings: AgentSettings) -> None:
        self.settings = settings
        self.actions = settings.actions
        self.max_steps = settings.max_steps
        self._first = AgentRun(task, seed, settings.prompt, Path())
        self._prepare = (
            load_attribute(settings.prepare, "env.prepare") if settings.prepare else None
        )
        self._grade: Any = lambda run: run.exit_code == 0
        if settings.grader:
            self._grade = load_attribute(settings.grader, "env.grader")
        self._words = split_command(settings.command, "env.command")
        workdir = Path(settings.workdir or "/nonexistent").expanduser()
        self._words[0] = find_program(self._words[0], search_path(settings.interpreter), workdir)
        if settings.sandbox:
            check_sandbox(Sandbox(Path(__file__).parent, settings.interpreter, writable_tree=False))
        self._episode: _Running | None = None

    def reset(self) -> Observation:
        self.close()
        self._steps = 0
        self._work_s = 0.0
        self._unread = 0
        self._continued = Continued()
        episode = self._episode = _Running(model_server(), self.settings)
        with base.closed_on_error(self):
            options = copy.deepcopy(dict(self.settings.options))
            self.run = replace(self._first, folder=episode.folder, options=options)
            workdir = self.settings.workdir
            if workdir is not None:
                _copy(Path(workdir).expanduser(), episode.folder)
            if self._prepare is not None:
                prompt = self._bounded("prepare", self._prepare, self.run)
                if not isinstance(prompt, str | None):
                    what = f"env.prepare {self.settings.prepare} returned {short(prompt)}, not a prompt"
                    raise EnvironmentFault(what)
                self.run = replace(self.run, prompt=self.run.prompt if prompt is None else prompt)
            if self.settings.sandbox:
                hand_over(episode.folder)
            episode.start(self._words, self.run, self.settings)
            waiting = self._await(episode, None)
            if waiting is None:
                end = episode.session.end
                refusal = episode.session.refusal
                what = (
                    end.words
                    if end
                    else f"did not ask within {self.settings.time_limit_s:g} s (env.time_limit_s)"
                )
                why = f"; its last request was refused: {refusal}" if refusal else ""
                raise EnvironmentFault(f"the agent never asked the model: it {what}{why}")
            shown = self._show(waiting)
            self.mission = self.run.prompt or "\n\n".join(map(base.text_of, self._messages))
            return shown

    def _await(self, episode: _Running, answer: Response | None) -> Waiting | None:
        """Send the answer, if there is one, and wait for the next request; None if there is
        none."""
        began = time.monotonic()
        session = episode.session
        left = self.settings.time_limit_s - self._work_s
        try:
            return episode.server.call(session.exchange(answer, left))
        finally:
            self._work_s += time.monotonic() - began

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        episode = self._episode
        if episode is None or episode.session.current is None:
            raise EpisodeOverError(
                "step was called before reset or after the episode's end; call reset first"
            )
        waiting = episode.session.current
        answer = read_response(
            response_text, waiting.request, self.settings.max_calls, self.call_form
        )
        number = waiting.number
        self._continued.answered(
            assistant_message(answer, number), assistant_message(answer, number, spelled=True)
        )
        self._steps += 1
        self._unread += bool(answer.errors)
        self.run = replace(
            self.run, turns=self._steps, messages=tuple(self._messages), answer=response_text
        )
        with base.closed_on_error(self):
            following = self._await(episode, answer)
            end = episode.session.end if following is None else None
            if (
                end is not None
                and end.exit_code
                and not (end.stopped or waiting.delivered)
                and waiting.alone
            ):
                # It ended before it received the response, and had received no other one since it
                # asked, so its client's time limit is to blame.
                what = f"while it waited for the model, the agent {end.words}"
                raise EnvironmentFault(f"{what}; give its client a longer time limit")
        done = following is None or self._steps >= self.max_steps
        info = self._info(response_text, answer, waiting)
        if done:
            info["terminated"] = end is not None
            info["truncated"] = end is None
            self._finish(episode, info, end)
        return self._show(following), done, info

    def _finish(self, episode: _Running, info: StepInfo, end: End | None) -> None:
        """End the program, and let the grader judge what it did."""
        try:
            episode.stop()
            if end is not None:
                self.run = replace(self.run, exit_code=end.exit_code)
                info.setdefault("metrics", {})["exit_code"] = float(end.exit_code)
            if end is not None or self.settings.grade_at_limit:
                ended = episode.session.end  # by now it has, also if a limit ended the episode
                self.run = replace(self.run, output=ended.output if ended else "")
                with base.timed("judge"):
                    score = self._score()
                info["reward"] += score
                info["progression"] = min(max(score, 0.0), 1.0)
        finally:
            self.close()

    def _score(self) -> float:
        value = self._bounded("grader", self._grade, self.run)
        try:
            return finite(value, "score")
        except ToolError as error:
            wrong = f"env.grader {self.settings.grader} returned {short(value)}, not a number"
            raise EnvironmentFault(wrong) from error

    def _bounded(self, name: str, function: Any, run: AgentRun) -> Any:
        """Call `prepare` or the grader; an error and a time-out are faults."""
        seconds = self.settings.grade_timeout_s
        try:
            return run_bounded(f"env.{name}", lambda: function(run), {}, seconds)
        except ToolTimeout as error:
            raise EnvironmentFault(
                f"env.{name} did not end within {seconds:g} s (env.grade_timeout_s)"
            ) from error
        except ToolError as error:
            raise EnvironmentFault(
                f"env.{name} {getattr(self.settings, name)} raised {error}"
            ) from error

    def _info(self, text: str, answer: Response, waiting: Waiting) -> StepInfo:
        assert self._episode is not None
        session = self._episode.session
        counts = {name: session.counts[name] for name in ("retries", "refused", "lost_answers")}
        counts |= {
            "thread": waiting.thread,
            "threads": len(session.threads),
            "unread_calls": self._unread,
        }
        return {
            "reward": -self.settings.format_penalty if answer.errors else 0.0,
            "terminated": False,
            "truncated": False,
            "valid_action": not answer.errors,
            "executed_action": self.default_action if answer.errors else answer.written,
            "progression": 0.0,
            "action": text[slice(*answer.span)] if answer.span else None,
            "action_span": answer.span,
            "moves": not waiting.request.compacts,
            "metrics": {
                "agent_s": self._work_s,
                **{name: float(count) for name, count in counts.items()},
            },
        }

    def _show(self, waiting: Waiting | None) -> Observation:
        self._messages = []
        self.continues = None
        if waiting is None:
            return base.make_observation("")
        request = waiting.request
        self._messages, self.continues = self._continued.show(
            request.messages, request.tools, with_images
        )
        self.tools = request.tools
        return base.make_observation(base.text_of(self._messages[-1]))

    def format_observation(self, observation: Observation) -> list[dict[str, Any]]:
        """Return the messages of the request that waits; none after the episode's end."""
        return self._messages

    def close(self) -> None:
        episode = self._episode
        self._episode = None
        if episode is not None:
            episode.close()


class _Running:
    """What an episode must release: its session, its program and its folder."""

    def __init__(self, server: ModelServer, settings: AgentSettings) -> None:
        self.server = server
        self.session = Session(settings.models, settings.request_mb << 20)
        self.key = server.open(self.session)
        self._outer = server.folder.make()
        self._program: Program | None = None
        self.folder, self._home, self._temporary = (
            self._outer / name for name in ("work", "home", "tmp")
        )
        for folder in (self.folder, self._home, self._temporary):
            folder.mkdir()

    def start(self, words: list[str], run: AgentRun, settings: AgentSettings) -> None:
        values = {
            "prompt": run.prompt,
            "task": run.task,
            "seed": str(run.seed),
            "model": settings.models[0],
        }
        found = addresses(None if settings.sandbox else self.server.port, self.key)
        variables = {name: os.environ[name] for name in settings.pass_env}
        variables |= {f"AGENT_{name.upper()}": value for name, value in values.items()}
        variables |= found
        values["folder"] = "/testbed" if settings.sandbox else str(run.folder)
        values["base_url"] = found["OPENAI_BASE_URL"]
        argv = [_filled(word, values) for word in words]
        variables |= {name: _filled(value, values) for name, value in settings.variables.items()}
        check_words(argv, variables)
        on_end = lambda end: self.server.soon(self.session.ended, end)
        if settings.sandbox:
            sandbox = Sandbox(run.folder, settings.interpreter, settings.limits)
            self._program = start_sandboxed(argv, sandbox, self.server.socket, variables, on_end)
        else:
            own = {"PATH": search_path(settings.interpreter), "LANG": "C.UTF-8"}
            own |= {"HOME": str(self._home), "TMPDIR": str(self._temporary)}
            self._program = start_plain(argv, run.folder, {**own, **variables}, on_end)

    def stop(self) -> None:
        """End the program and refuse its requests; a second call does nothing."""
        program = self._program
        self._program = None
        try:
            if program is not None:
                program.stop()
        finally:
            self.server.close(self.key)

    def close(self) -> None:
        """Stop, and remove the episode's files."""
        try:
            self.stop()
        finally:
            remove_tree(self._outer)


def _copy(workdir: Path, folder: Path) -> None:
    """Copy `env.workdir`; raises ConfigError for a file that is neither plain nor a link."""
    try:
        shutil.copytree(workdir, folder, symlinks=True, dirs_exist_ok=True)
    except shutil.Error as error:
        source, _, why = error.args[0][0]
        raise ConfigError(f"env.workdir: {source} cannot be copied: {why}") from error
    # The original may be read-only; the agent works in its copy.
    folder.chmod(folder.stat().st_mode | stat.S_IRWXU)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with each `{name}` of `values` replaced; other braces are left alone."""
    return re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), text)


def build_env(sample: Any, args: Any) -> AgentEnv:
    """Return the environment of one episode; `task` and `seed` reach the program and the grader."""
    task, seed = base.describe_task(sample)
    return AgentEnv(task, seed, base.read_env_settings(AgentSettings, args))
