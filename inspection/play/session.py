"""The dialogue of `slime-verlog play`: shows prompts, reads answers and commands."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.base import StepInfo
from inspection.play.game import Game, new_messages
from inspection.play.pictures import Pictures
from inspection.text import bold, printable
from rollout.play.memory import Message
from slime_verlog import INTERRUPTED

HELP = """\
Type an action, or a whole answer (THINK: ... ACTION: ...). Commands:
  /prompt, p   the whole prompt, as the model gets it
  /actions     the environment's actions
  /expert      what the environment's expert would do
  /undo [N]    take back the last turn, or N turns
  /restart     the same episode from the beginning
  /next        the episode of the next seed
  /quit        end (also Ctrl-D)
To answer with a text that begins with /, write // instead. A \\n in your answer becomes a line break."""


class Session:
    """Talks with a person until the input ends."""

    def __init__(self, game: Game, pictures: Pictures, full: bool) -> None:
        self.game, self._pictures, self._full = game, pictures, full
        self._shown: list[Message] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "prompt": lambda _: self._show(self.game.messages),
            "actions": lambda _: self._actions(),
            "expert": lambda _: self._expert(),
            "undo": self._undo,
            "restart": lambda _: self._restart(self.game.seed),
            "next": lambda _: self._restart(self.game.seed + 1),
            "help": lambda _: print(HELP),
        }

    def run(self) -> int:
        """Run the dialogue; return 0, or 130 after Ctrl-C."""
        _use_readline(self.game.abilities.actions)
        print(f"task {self.game.episode.name}, seed {self.game.seed}. /help lists the commands.\n")
        self._show(self.game.messages)
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
            name, _, rest = line[1:].partition(" ")
            command = self._commands.get(name)
            if command is None:
                print(f"unknown command /{name}; /help lists the commands")
            else:
                command(rest.strip())
        elif self.game.over is not None:
            print("the episode is over; /undo, /restart, /next or /quit")
        elif line:
            self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _answer(self, line: str) -> None:
        before, request = list(self.game.messages), self.game.reply.answer_format
        info = self.game.answer(line.replace("\\n", "\n"))
        print(_outcome(info) + f"   {self._score()}\n")
        same = request if self.game.reply.answer_format == request else ""
        self._show(self.game.messages if self._full else new_messages(before, self.game.messages, same))
        if self.game.over is not None:
            progress = f"progression {info['progression']:.2g}"
            print(f"the episode is over ({self.game.over}): {progress}. /undo, /restart, /next or /quit")

    def _show(self, messages: Sequence[Message]) -> None:
        if messages and messages[0]["role"] == "system":
            for tool in self.game.reply.tools:
                print(f"{bold('[tool]')} {json.dumps(tool)}")
        for message in messages:
            print(bold(f"[{message['role']}]"))
            print(self._text(message["content"]) + "\n")

    def _text(self, content: str | Sequence[Mapping[str, Any]]) -> str:
        if isinstance(content, str):
            return printable(content)
        return "".join(
            self._pictures.show(part["image"]) + "\n" if part["type"] == "image" else printable(part["text"])
            for part in content
        )

    def _actions(self) -> None:
        actions = self.game.abilities.actions
        print("\n".join(actions) if actions else "the environment names no actions; any text may be an answer")

    def _expert(self) -> None:
        if self.game.over is not None:
            print("the episode is over")
            return
        hint = self.game.hint()
        print(f"the expert would answer: {printable(hint)}" if hint else "the environment has no expert_action(env)")

    def _undo(self, rest: str) -> None:
        if rest and not (rest.isdecimal() and int(rest) > 0):
            print(f"/undo takes a number of turns, got {rest}")
        elif not self.game.turns:
            print("there is nothing to undo")
        elif not self.game.reply.deterministic:
            print("the environment says deterministic = False, so turns cannot be undone")
        else:
            self.game.undo(int(rest or 1))
            print(f"back at {self._score()}\n")
            self._show(self.game.messages if self._full else self.game.messages[-1:])

    def _restart(self, seed: int) -> None:
        self.game.restart(seed)
        print(f"seed {seed}\n")
        self._show(self.game.messages)

    def _score(self) -> str:
        count = len(self.game.turns)
        return f"{count} turn{'s' * (count != 1)}, return {self.game.total:.4g}"


def _outcome(info: StepInfo) -> str:
    reward, executed = float(info["reward"]), printable(info["executed_action"])
    if info["valid_action"]:
        return f"reward {reward:.4g}   valid, executed: {executed}"
    return f"reward {reward:.4g}   INVALID, executed instead: {executed or 'nothing'}"


def _use_readline(actions: Sequence[str]) -> None:
    """Arrow keys, history, and completion of actions with the tab key."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_completer_delims("")
        readline.set_completer(lambda text, k: [*(a for a in actions if a.startswith(text)), None][k])
        readline.parse_and_bind("tab: complete")
