"""The dialogue of `slime-verlog play`: shows prompts, reads answers and commands."""

import contextlib
import json
import sys
from collections.abc import Sequence

from inspection.play.game import Game, new_messages
from inspection.play.images import Images
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
To answer with a text that begins with /, write // instead. A \\n in your answer becomes a line break, so
NOTES: the key is red\\nACTION: go writes notes, if the YAML says memory: {kind: inline_notes}. With kind: notes,
some prompts ask for notes alone; your answer to these is not an action."""


class Session:
    """Talks with a person until the input ends."""

    def __init__(self, game: Game, images: Images, full: bool) -> None:
        self.game, self._images, self._full = game, images, full

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
            self._command(name, rest.strip())
        elif self.game.over is not None:
            print("the episode is over; /undo, /restart, /next or /quit")
        elif line:
            self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "prompt":
                self._show(self.game.messages)
            case "actions":
                names = self.game.abilities.actions
                print("\n".join(names) or "the environment names no actions; any text may be an answer")
            case "expert" if self.game.over is not None:
                print("the episode is over")
            case "expert":
                hint = self.game.hint()
                says = f"the expert would answer: {printable(hint)}" if hint else None
                print(says or "the environment has no expert_action(env)")
            case "undo":
                self._undo(rest)
            case "restart" | "next":
                self.game.restart(self.game.seed + (name == "next"))
                print(f"seed {self.game.seed}\n")
                self._show(self.game.messages)
            case "help":
                print(HELP)
            case _:
                print(f"unknown command /{name}; /help lists the commands")

    def _answer(self, line: str) -> None:
        before, request = list(self.game.messages), self.game.request
        info = self.game.answer(line.replace("\\n", "\n"))
        if info is None:
            print(f"noted; the environment did not move   {self._score()}\n")
            self._show(self.game.messages)
            return
        reward, executed = float(info["reward"]), printable(info["executed_action"])
        invalid = f"INVALID, executed instead: {executed or 'nothing'}"
        outcome = f"valid, executed: {executed}" if info["valid_action"] else invalid
        print(f"reward {reward:.4g}   {outcome}   {self._score()}\n")
        same = request if self.game.request == request else ""
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
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            show = lambda part: self._images.show(part["image"]) + "\n"
            print("".join(show(part) if part["type"] == "image" else printable(part["text"]) for part in parts) + "\n")

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

    def _score(self) -> str:
        count = self.game.steps
        return f"{count} turn{'s' * (count != 1)}, return {self.game.total:.4g}"


def _use_readline(actions: Sequence[str]) -> None:
    """Arrow keys, history, and completion of actions with the tab key."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_completer_delims("")
        readline.set_completer(lambda text, k: [*(a for a in actions if a.startswith(text)), None][k])
        readline.parse_and_bind("tab: complete")
