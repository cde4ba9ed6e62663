"""The messages of an episode's current prompt, with a memory window or with the whole episode (`history: full`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from envs.base import Observation
from rollout.play.memory import Exchange, Memory, Message, build_messages
from rollout.workers.reply import EnvReply


class Conversation:
    """Collects an episode's exchanges; `messages` is the current prompt.

    Call `show` with every reply of the environment, and `answered` with every answer before the next reply is shown.
    """

    def __init__(self, memory: Memory | None) -> None:
        """With `memory` None, prompts show the whole episode."""
        self._memory = memory
        self.past: deque[Exchange] = deque(maxlen=memory.horizon if memory else 0)
        self.messages: list[Message] = []
        self._index = 0

    def show(self, reply: EnvReply) -> list[Message]:
        """Add the environment's reply. Returns the new messages: the whole prompt, unless `history` is full."""
        if reply.whole_prompts:
            self.messages = list(map(dict, reply.messages))
            return self.messages
        if self._memory is not None:
            system, ask, past = reply.instruction_prompt, reply.answer_format, list(self.past)
            self.messages = build_messages(self._memory, system, past, reply.observation, self._index, ask)
            return self.messages
        *earlier, last = reply.messages
        new = [*map(dict, earlier), _ask(last, reply.answer_format)]
        if not self.messages and reply.instruction_prompt:
            new = [{"role": "system", "content": reply.instruction_prompt}, *new]
        self.messages += new
        return new

    def answered(self, shown: Observation, answer: str, valid: bool, executed_action: str) -> None:
        """Add an answer to the observation `shown`."""
        self._index += 1
        if self._memory is None:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.past.append(Exchange(shown, answer, valid, executed_action))


def _ask(message: Mapping[str, Any], answer_format: str) -> Message:
    """The environment's message followed by the request for an answer."""
    if not answer_format:
        return dict(message)
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}\n\n{answer_format}"}
    return {**message, "content": [*content, {"type": "text", "text": f"\n\n{answer_format}"}]}
