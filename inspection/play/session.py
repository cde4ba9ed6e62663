"""The dialogue of `slime-verlog play`: shows prompts and their images, reads answers and commands."""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inspection.play.game import Game, new_messages
from inspection.text import bold, printable
from rollout.play.memory import Message
from slime_verlog import INTERRUPTED, ConfigError

BLOCK_COLUMNS = 64
"""Width of an image drawn with half blocks; each character shows two pixels, one above the other."""
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
    """Talks with a person until the input ends; images go to `folder`."""

    def __init__(self, game: Game, folder: Path, full: bool) -> None:
        self.game, self._folder, self._full = game, folder, full
        self._images = 0

    def run(self) -> int:
        """Run the dialogue; return 0, or 130 after Ctrl-C."""
        actions = self.game.abilities.actions
        with contextlib.suppress(ImportError):  # arrow keys, history, and completion of actions with the tab key
            import readline

            readline.set_completer_delims("")
            readline.set_completer(lambda text, k: [*(a for a in actions if a.startswith(text)), None][k])
            readline.parse_and_bind("tab: complete")
        print(f"task {self.game.episode.name}, seed {self.game.seed}. /help lists the commands.\n")
        self._show(self.game.conversation.messages)
        try:
            while (line := self._read()) is not None and line != "/quit":
                if line == "p" and "p" not in actions:
                    line = "/prompt"
                if line.startswith("/") and not line.startswith("//"):
                    name, _, rest = line[1:].partition(" ")
                    self._command(name, rest.strip())
                elif self.game.over is not None:
                    print("the episode is over; /undo, /restart, /next or /quit")
                elif line:
                    self._answer(line.removeprefix("/") if line.startswith("//") else line)
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

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "prompt":
                self._show(self.game.conversation.messages)
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
                self._show(self.game.conversation.messages)
            case "help":
                print(HELP)
            case _:
                print(f"unknown command /{name}; /help lists the commands")

    def _answer(self, line: str) -> None:
        conversation = self.game.conversation
        before, request = list(conversation.messages), conversation.request
        info = self.game.answer(line.replace("\\n", "\n"))
        if info is None:
            print(f"noted; the environment did not move   {self._score()}\n")
            self._show(conversation.messages)
            return
        reward, executed = float(info["reward"]), printable(info["executed_action"])
        invalid = f"INVALID, executed instead: {executed or 'nothing'}"
        outcome = f"valid, executed: {executed}" if info["valid_action"] else invalid
        print(f"reward {reward:.4g}   {outcome}   {self._score()}\n")
        same = request if conversation.request == request else ""
        self._show(conversation.messages if self._full else new_messages(before, conversation.messages, same))
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
            show = lambda part: self._write(part["image"]) + "\n"
            print("".join(show(part) if part["type"] == "image" else printable(part["text"]) for part in parts) + "\n")

    def _write(self, image: Any) -> str:
        """Write an image to a numbered file, draw it where the terminal has true colour, and return file and size."""
        path = self._folder / f"picture_{self._images:04}.png"
        self._images += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            image.save(path)
        except OSError as error:
            raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from error
        if sys.stdout.isatty() and os.environ.get("COLORTERM") in ("truecolor", "24bit"):
            print(half_blocks(image))
        return f"[picture {image.size[0]} x {image.size[1]}: {path}]"

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
            messages = self.game.conversation.messages
            self._show(messages if self._full else messages[-1:])

    def _score(self) -> str:
        rewards = [float(info["reward"]) for info in self.game.infos]
        return f"{len(rewards)} turn{'s' * (len(rewards) != 1)}, return {sum(rewards):.4g}"


def half_blocks(image: Any) -> str:
    """Return the image as rows of upper half blocks in true colour."""
    columns = min(BLOCK_COLUMNS, image.size[0])
    rows = max(2, round(image.size[1] * columns / image.size[0]) // 2 * 2)
    small = image.convert("RGB").resize((columns, rows))
    lines = []
    for y in range(0, rows, 2):
        pairs = [(small.getpixel((x, y)), small.getpixel((x, y + 1))) for x in range(columns)]
        blocks = (f"\033[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀" for a, b in pairs)
        lines.append("".join([*blocks, "\033[0m"]))
    return "\n".join(lines)
