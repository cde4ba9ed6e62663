"""Records where the time of a turn goes, as spans in slime's own traces."""

import importlib
import time
import uuid
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from rollout.bridge.framework import HAS_SLIME, Sample
from rollout.turn import ENGINE, EnvReply, Span, Turn


def is_traced(args: Any) -> bool:
    """Whether turns record where their time goes, as spans that slime saves with
    `--save-debug-rollout-data`."""
    return HAS_SLIME and getattr(args, "save_debug_rollout_data", None) is not None


class SpanLog:
    """Collects the spans of the turn in progress; does nothing unless turns are traced."""

    def __init__(self, traced: bool) -> None:
        self._traced = traced
        self._spans: list[Span] = []

    def add_request(self, began_s: float, meta_info: Mapping[str, Any]) -> None:
        """Add a request to the engine that has ended now."""
        if self._traced:
            self._spans.append(Span(ENGINE, began_s, time.time(), meta_info))

    def add_step(self, sent_s: float, reply: EnvReply) -> None:
        """Add a step of the environment that has ended now."""
        if not self._traced:
            return
        now_s = time.time()
        began_s = now_s - reply.seconds
        parts = tuple(
            Span(name, began_s + start, began_s + end) for name, start, end in reply.parts
        )
        self._spans.append(Span("environment", sent_s, now_s, {"env_s": reply.seconds}, parts))

    def take(self) -> tuple[Span, ...]:
        """Return the turn's spans, and begin the next turn."""
        spans = tuple(self._spans)
        self._spans = []
        return spans


@cache
def _tracing() -> Any:
    """slime's module for traces, where main or v0.3.1 has it."""
    try:
        return importlib.import_module("slime.observability.trace_utils")
    except ModuleNotFoundError:
        return importlib.import_module("slime.utils.trace_utils")


def attach_trace(sample: Sample, turns: Iterable[Turn]) -> None:
    """Add the turns' spans to the sample's trace; does nothing for turns without spans."""
    traced = [turn for turn in turns if turn.spans]
    if not traced:
        return
    tracing = _tracing()
    handle = tracing.bind_trace(sample)
    for turn in traced:
        facts = {
            "episode_id": turn.episode_id,
            "turn": turn.index,
            "reward": turn.reward,
            "valid": turn.valid,
        }
        whole = Span("turn", turn.spans[0].start_s, turn.spans[-1].end_s, facts, turn.spans)
        _add(tracing, handle, whole, None)


def _add(tracing: Any, handle: Any, span: Span, parent: str | None) -> None:
    """Append the events of a span and of those inside it, as `trace_span` does while time
    passes."""
    number = uuid.uuid4().hex
    event = {"name": span.name, "span_id": number, "attempt": handle.attempt}
    event |= {name: getattr(handle, name) for name in ("trace_id", "sample_id", "group_id")}
    start = {**event, "type": "span_start", "ts": span.start_s}
    handle.carrier["events"].append(
        start if parent is None else {**start, "parent_span_id": parent}
    )
    for inner in span.inside:
        _add(tracing, handle, inner, number)
    facts: Mapping[str, Any] | None = span.facts
    if span.name == ENGINE:
        context = tracing.TraceSpanContext(handle, [handle], [(handle, number)], span.start_s)
        facts = context.update(
            tracing.build_sglang_meta_trace_attrs(dict(span.facts))
        ).build_end_attrs()
    end = {**event, "type": "span_end", "ts": span.end_s}
    handle.carrier["events"].append({**end, "attrs": dict(facts)} if facts else end)
