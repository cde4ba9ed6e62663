"""Where each turn's time went, as slime's trace spans, which its timeline viewer shows.

`is_on` alone decides whether turns record spans. slime saves traces with the samples of `--save-debug-rollout-data`, so
without this flag (or `--dump-details`, which sets it) nothing is recorded and nothing of slime's tracing is imported.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from rollout.bridge.framework import FRAMEWORK, Sample
from rollout.turn import ENGINE, Span, Turn

_MODULES = ("slime.observability.trace_utils", "slime.utils.trace_utils")
"""slime's module with the spans, today's and v0.3's."""


def is_on(args: Any) -> bool:
    """Whether turns record where their time goes."""
    wanted = FRAMEWORK == "slime" and getattr(args, "save_debug_rollout_data", None) is not None
    return wanted and _module() is not None


@cache
def _module() -> Any:
    """slime's tracing; None if this slime has none."""
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None


def attach(sample: Sample, turns: Iterable[Turn]) -> None:
    """Add the turns' spans to the sample's trace; does nothing for turns without spans."""
    traced = [turn for turn in turns if turn.spans]
    tracing = _module() if traced else None
    if tracing is None:
        return
    handle = tracing.bind_trace(sample)
    for turn in traced:
        facts = {"episode_id": turn.episode_id, "turn": turn.index, "reward": turn.reward, "valid": turn.valid}
        whole = Span("turn", turn.spans[0].start_s, turn.spans[-1].end_s, facts, turn.spans)
        _add(tracing, handle, whole, None)


def _add(tracing: Any, handle: Any, span: Span, parent: str | None) -> None:
    """Append the events of a span and of those inside it, as `trace_span` does while time passes."""
    number = uuid.uuid4().hex
    start = _event(handle, "span_start", span, span.start_s, number)
    handle.carrier["events"].append(start if parent is None else {**start, "parent_span_id": parent})
    for inner in span.inside:
        _add(tracing, handle, inner, number)
    facts: Mapping[str, Any] | None = span.facts
    if span.name == ENGINE:
        context = tracing.TraceSpanContext(handle, [handle], [(handle, number)], span.start_s)
        facts = context.update(tracing.build_sglang_meta_trace_attrs(dict(span.facts))).build_end_attrs()
    end = _event(handle, "span_end", span, span.end_s, number)
    handle.carrier["events"].append({**end, "attrs": dict(facts)} if facts else end)


def _event(handle: Any, kind: str, span: Span, moment_s: float, number: str) -> dict[str, Any]:
    return {
        "type": kind,
        "name": span.name,
        "ts": moment_s,
        "trace_id": handle.trace_id,
        "sample_id": handle.sample_id,
        "group_id": handle.group_id,
        "attempt": handle.attempt,
        "span_id": number,
    }
