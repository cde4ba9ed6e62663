"""Periods that worked on a turn, for slime's traces."""

import time
from typing import Any

from rollout.turn import ENGINE, EnvReply, Span


class SpanLog:
    """Collects the spans of the turn in progress; does nothing unless turns are traced."""

    def __init__(self, traced: bool) -> None:
        self._traced = traced
        self._spans: list[Span] = []

    def add_request(self, began_s: float, meta_info: Any) -> None:
        """Add a request to the engine that has ended now."""
        if self._traced:
            self._spans.append(Span(ENGINE, began_s, time.time(), meta_info))

    def add_step(self, sent_s: float, reply: EnvReply) -> None:
        """Add a step of the environment that has ended now."""
        if not self._traced:
            return
        now_s = time.time()
        began_s = now_s - reply.seconds
        parts = tuple(Span(name, began_s + start, began_s + end) for name, start, end in reply.parts)
        self._spans.append(Span("environment", sent_s, now_s, {"env_s": reply.seconds}, parts))

    def take(self) -> tuple[Span, ...]:
        """Return the turn's spans, and begin the next turn."""
        spans, self._spans = tuple(self._spans), []
        return spans
