"""The dialogue of `slime-verlog play`: shows prompts and their images, reads answers and commands.

A `Game` is one episode that a person plays: the environment in a worker process, and the prompt.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.base import StepInfo
from envs.mixture import TaskSpec
from inspection.target import Target
from inspection.text import bold, printable
from rollout.play.conversation import Conversation
from rollout.play.memory import Message, memory_of
from rollout.play.notes import write_facts
from rollout.tasks import make_episode
from rollout.turn import EnvReply
from rollout.workers.abilities import abilities, suggest
from rollout.workers.trial import Trial
from slime_verlog import INTERRUPTED

HELP = """\
Type an action, or a whole answer (THINK: ... ACTION: ...). Commands:
  /prompt, p   the whole prompt, as the model gets it
  /actions     the environment's actions
  /expert      what the environment's expert would do
  /restart     the same episode from the beginning
  /next        the episode of the next seed
  /quit        end (also Ctrl-D)
To answer with a text that begins with /, write // instead. A \\n in your answer becomes a line break, so
NOTES: the key is red\\nACTION: go writes notes, if the YAML says memory: {kind: inline_notes}. With kind: notes,
some prompts ask for notes alone; your answer to these is not an action."""


class Game(contextlib.ExitStack):
    """Plays one task, seed after seed; use it as a context manager, which ends the worker
    process."""

    def __init__(self, target: Target, task: TaskSpec) -> None:
        super().__init__()
        self._target = target
        self._task = task
        self._settings = target.settings
        self._run = self.enter_context(asyncio.Runner()).run
        self._trial = Trial(target.settings)
        self.callback(self._trial.end)

    @property
    def over(self) -> str | None:
        """Why the episode is over; None while it goes on."""
        if not self.infos:
            return None
        if self.infos[-1]["terminated"]:
            return "terminated"
        if self.infos[-1]["truncated"]:
            return "time limit of the environment"
        limit = self._settings.max_turns
        return "max_turns" if limit and len(self.infos) >= limit else None

    def answer(self, text: str) -> StepInfo | None:
        """Take one step; None if the prompt asked for notes. Raises EnvironmentFault if the
        environment broke."""
        if self._writes_notes:
            self.conversation.noted(self.conversation.cut_notes(text))
            self._show(may_ask=False)
            return None
        shown = self.reply.observation
        self.reply = self._run(self._trial.step(self.episode, text))
        info = self.reply.info
        assert info is not None
        self.infos.append(info)
        self.conversation.answered(shown, text, info["valid_action"], info["executed_action"])
        self._show(may_ask=self.over is None)
        return info

    def _show(self, *, may_ask: bool) -> None:
        """Make the next prompt, which may ask for notes."""
        self.conversation.show(self.reply)
        self._writes_notes = may_ask and self.conversation.wants_notes()
        if self._writes_notes:
            self.conversation.show(self.reply, notes=True)

    def hint(self) -> str | None:
        """Return the expert's next response; None if the environment has no expert, or no facts to
        note."""
        if self._writes_notes:
            return write_facts(self.reply.facts) or None
        if not self.abilities.has_expert:
            return None
        advice = self._run(self._trial.ask(self.episode, suggest, "expert", len(self.infos)))
        return self.conversation.with_notes(advice, self.reply.facts)

    def restart(self, seed: int) -> None:
        """Play from the beginning."""
        self.seed = seed
        self.infos: list[StepInfo] = []
        """What each turn said that reached the environment."""
        self.episode = make_episode(self._settings, self._task, 0, seed)
        self.conversation = Conversation(memory_of(self._settings))
        with self._target.explained():
            self._run(self._trial.build(self.episode))
        self.reply: EnvReply = self._run(self._trial.reset(self.episode))
        self.abilities = self._run(self._trial.ask(self.episode, abilities))
        self._show(may_ask=False)


def news_of(messages: Sequence[Message]) -> Sequence[Message]:
    """Return what follows the last response in a prompt; the last message if there is none."""
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "assistant":
            return messages[place + 1 :]
    return messages[-1:]


class Session:
    """Talks with a person until the input ends; images go to `folder`."""

    def __init__(self, game: Game, folder: Path) -> None:
        self.game = game
        self._folder = folder
        self._images = 0

    def run(self) -> int:
        """Run the dialogue; return 0, or 130 after Ctrl-C."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history
        print(f"task {self.game.episode.name}, seed {self.game.seed}. /help lists the commands.\n")
        self._show(self.game.conversation.messages)
        try:
            while (line := self._read()) is not None and line != "/quit":
                self._obey(line)
        except KeyboardInterrupt:
            print(f"\nstopped after {self._score()}")
            return INTERRUPTED
        print(f"stopped after {self._score()}" if self.game.over is None else "bye")
        return 0

    def _read(self) -> str | None:
        """One line, without the space around it; None at the end of the input."""
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return None
        if not sys.stdin.isatty():
            print(line)
        return line

    def _obey(self, line: str) -> None:
        if line == "p" and "p" not in self.game.abilities.actions:
            line = "/prompt"
        if line.startswith("/") and not line.startswith("//"):
            self._command(line[1:])
        elif self.game.over is not None:
            print("the episode is over; /restart, /next or /quit")
        elif line:
            self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _command(self, name: str) -> None:
        match name:
            case "prompt":
                self._show(self.game.conversation.messages)
            case "actions":
                names = self.game.abilities.actions
                print(
                    "\n".join(names)
                    or "the environment names no actions; any text may be an answer"
                )
            case "expert" if self.game.over is not None:
                print("the episode is over")
            case "expert":
                hint = self.game.hint()
                print(
                    f"the expert would answer: {printable(hint)}"
                    if hint
                    else "the environment has no expert_action(env)"
                )
            case "restart" | "next":
                self.game.restart(self.game.seed + (name == "next"))
                print(f"seed {self.game.seed}\n")
                self._show(self.game.conversation.messages)
            case "help":
                print(HELP)
            case _:
                print(f"unknown command /{name}; /help lists the commands")

    def _answer(self, line: str) -> None:
        info = self.game.answer(line.replace("\\n", "\n"))
        if info is None:
            print(f"noted; the environment did not move   {self._score()}\n")
        else:
            executed = printable(info["executed_action"])
            outcome = f"valid, executed: {executed}"
            if not info["valid_action"]:
                outcome = f"INVALID, executed instead: {executed or 'nothing'}"
            print(f"reward {float(info['reward']):.4g}   {outcome}   {self._score()}\n")
        self._show(news_of(self.game.conversation.messages))
        if info is not None and self.game.over is not None:
            progress = f"progression {info['progression']:.2g}"
            print(f"the episode is over ({self.game.over}): {progress}. /restart, /next or /quit")

    def _show(self, messages: Sequence[Message]) -> None:
        if messages and messages[0]["role"] == "system":
            for tool in self.game.reply.tools:
                print(f"{bold('[tool]')} {json.dumps(tool)}")
        for message in messages:
            print(bold(f"[{message['role']}]"))
            content = message["content"]
            for part in (
                [{"type": "text", "text": content}] if isinstance(content, str) else content
            ):
                if part["type"] == "image":
                    print(self._write(part["image"]))
                else:
                    print(printable(part["text"]), end="")
            print("\n")

    def _write(self, image: Any) -> str:
        """Write an image to a numbered file, and return file and size."""
        path = self._folder / f"picture_{self._images:04}.png"
        self._images += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        image.save(path)
        return f"[picture {image.size[0]} x {image.size[1]}: {path}]"

    def _score(self) -> str:
        rewards = [float(info["reward"]) for info in self.game.infos]
        return f"{len(rewards)} turn{'s' * (len(rewards) != 1)}, return {sum(rewards):.4g}"
