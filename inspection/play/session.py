"""The dialogue of `slime-verlog play`: shows prompts and their images, reads answers and commands.

A `Game` is one episode that a person plays: the environment in a worker process, the prompt, and undo by replay.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.base import StepInfo
from envs.mixture import TaskSpec
from inspection.target import Target
from inspection.text import bold, printable
from rollout.errors import EnvironmentFault
from rollout.play.memory import Conversation, Message, build_memory, write_facts
from rollout.tasks import make_episode
from rollout.turn import EnvReply
from rollout.workers.trial import Trial
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


@dataclass(frozen=True)
class Turn:
    """A response and what came of it."""

    answer: str
    info: StepInfo | None
    """None if the response was notes."""
    digest: str


class Game(contextlib.AbstractContextManager["Game"]):
    """Plays one task, seed after seed; use it as a context manager, which ends the worker process."""

    def __init__(self, target: Target, task: TaskSpec, seed: int) -> None:
        self._target, self._task, self._settings = target, task, target.settings
        self._runner = asyncio.Runner()
        self._run = self._runner.run
        self._trial = Trial(target.settings)
        try:
            self.restart(seed)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._trial.end()
        self._runner.close()

    @property
    def infos(self) -> list[StepInfo]:
        """What each turn said that reached the environment."""
        return [turn.info for turn in self.turns if turn.info is not None]

    @property
    def over(self) -> str | None:
        """Why the episode is over; None while it goes on."""
        if not (infos := self.infos):
            return None
        if infos[-1]["terminated"]:
            return "terminated"
        if infos[-1]["truncated"]:
            return "time limit of the environment"
        return "max_turns" if self._settings.max_turns and len(infos) >= self._settings.max_turns else None

    def answer(self, text: str) -> StepInfo | None:
        """Take one step; None if the prompt asked for notes. Raises EnvironmentFault if the environment broke."""
        if self._writes_notes:
            self.turns.append(Turn(text, None, self.reply.digest))
            self.conversation.noted(self.conversation.cut_notes(text))
            self._show(may_ask=False)
            return None
        shown = self.reply.observation
        self.reply = self._run(self._trial.step(self.episode, text))
        info = self.reply.info
        assert info is not None
        self.turns.append(Turn(text, info, self.reply.digest))
        self.conversation.answered(shown, text, info["valid_action"], info["executed_action"])
        self._show(may_ask=self.over is None)
        return info

    def _show(self, *, may_ask: bool) -> None:
        """Make the next prompt, which may ask for notes."""
        self.conversation.show(self.reply)
        self._writes_notes = may_ask and self.conversation.wants_notes()
        if self._writes_notes:
            self.conversation.show(self.reply, notes=True)

    def undo(self, count: int) -> None:
        """Replay the episode without its last `count` turns; raises EnvironmentFault if the replay differs."""
        kept = self.turns[: max(0, len(self.turns) - count)]
        self.restart(self.seed)
        for number, turn in enumerate(kept, 1):
            self.answer(turn.answer)
            if self.turns[-1].digest != turn.digest:
                differs = f"the replay differs at step {number}, so nothing can be undone"
                raise EnvironmentFault(f"task {self._task.name!r}: {differs}; `slime-verlog check` finds out why")

    def hint(self) -> str | None:
        """Return the expert's next response; None if the environment has no expert, or no facts to note."""
        if self._writes_notes:
            return write_facts(self.reply.facts) or None
        if not self.abilities.has_expert:
            return None
        advice = self._run(self._trial.suggest(self.episode, "expert", len(self.turns)))
        return self.conversation.with_notes(advice, self.reply.facts)

    def restart(self, seed: int) -> None:
        """Play from the beginning."""
        self.seed = seed
        self.turns: list[Turn] = []
        self.episode = make_episode(self._settings, self._task, 0, seed)
        memory = build_memory(self._settings.memory) if self._settings.history == "window" else None
        self.conversation = Conversation(memory)
        with self._target.explained():
            self._run(self._trial.build(self.episode))
        self.reply: EnvReply = self._run(self._trial.reset(self.episode))
        self.abilities = self._run(self._trial.abilities(self.episode))
        self._show(may_ask=False)


def new_messages(before: Sequence[Message], now: Sequence[Message], request: str) -> list[Message]:
    """Return what the last prompt did not show, without the response and the `request` that it repeats."""
    if not now:  # an agent that has ended asks nothing
        return []
    if list(now[: len(before)]) == list(before):
        new = [message for message in now[len(before) :] if message["role"] != "assistant"]
    else:
        system = [m for m in now[:1] if m["role"] == "system" and m not in before]
        new = [*system, now[-1]]
    return [*new[:-1], _without(new[-1], request)] if new else []


def _without(message: Mapping[str, Any], request: str) -> Message:
    content, tail = message["content"], f"\n\n{request}"
    if request and isinstance(content, str) and content.endswith(tail):
        content = content.removesuffix(tail)
    elif request and content and isinstance(content, list) and content[-1].get("text", "").endswith(tail):
        last = content[-1]["text"].removesuffix(tail)
        content = [*content[:-1], *([{"type": "text", "text": last}] if last else [])]
    return {**message, "content": content}


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
