"""One episode that a person plays: the environment in a worker process, the prompt, and undo by replay."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from envs.base import StepInfo
from envs.mixture import TaskSpec
from inspection.target import Target
from rollout.errors import EnvironmentFault
from rollout.play.memory import Conversation, Message, build_memory, write_facts
from rollout.tasks import make_episode
from rollout.workers.reply import EnvReply, digest
from rollout.workers.trial import Trial


@dataclass(frozen=True)
class Turn:
    """A response and what came of it."""

    answer: str
    info: StepInfo | None
    """None if the response was notes."""
    digest: str


class Game:
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

    def __enter__(self) -> Self:
        return self

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
            self.turns.append(Turn(text, None, digest(self.reply)))
            self.conversation.noted(self.conversation.cut_notes(text))
            self._show(may_ask=False)
            return None
        shown = self.reply.observation
        self.reply = self._run(self._trial.step(self.episode, text))
        info = self.reply.info
        assert info is not None
        self.turns.append(Turn(text, info, digest(self.reply)))
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
        return self._run(self._trial.suggest(self.episode, "expert", len(self.turns)))

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
