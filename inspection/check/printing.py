"""Prints a check: the first prompt as the model sees it, then what was found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inspection.check.findings import Finding, Status
from inspection.check.session import TaskReport
from inspection.text import bold, paint, printable

COLORS = {Status.OK: "32", Status.WARNING: "33", Status.ERROR: "31"}
ALL_ROWS = 3
"""With more tasks than this, a command counts findings that are ok instead of printing them."""


def print_prompt(report: TaskReport, encoder: Callable[..., Any] | None) -> None:
    """The first prompt of a task: with roles, or as rendered by the chat template with its number of tokens."""
    if not report.first_prompt:
        return
    heading = f"first prompt of task {report.name!r}, seed {report.seed}"
    if encoder is None:
        chars = sum(len(text) for _, text in shown_messages(report.first_prompt))
        print(f"--- {heading} ({chars:,} characters) ---")
        for role, text in shown_messages(report.first_prompt):
            print(f"{bold(f'[{role}]')}\n{printable(text)}\n")
        for tool in report.tools:
            print(f"{bold('[tool]')} {json.dumps(tool)}")
    else:
        own = encoder(tools=report.tools) if report.tools else encoder()
        ids = list(own.prompt(report.first_prompt).token_ids)
        print(f"--- {heading} ({len(ids):,} tokens) ---")
        print(printable(own.tokenizer.decode(ids)))
    print("---\n")


def shown_messages(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Role and text of each message; pictures appear as their size."""
    return [(message["role"], _content(message["content"])) for message in messages]


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(_picture(part["image"]) if part["type"] == "image" else part["text"] for part in content)


def _picture(image: Any) -> str:
    size = getattr(image, "size", None)
    return f"[picture {size[0]} x {size[1]}]\n" if isinstance(size, tuple) else "[picture]\n"


def rows_of(report: TaskReport, brief: bool) -> str:
    """The task's name and one row per finding; `brief` counts those that are ok instead."""
    rows = [row for row in report.findings if not brief or row.status != Status.OK]
    hidden = len(report.findings) - len(rows)
    heading = bold(f"task {report.name}") + (f": {hidden} checks ok" if hidden else "")
    return "\n".join([heading, *(f"  {_colored(row)} {row.name:<12} {printable(row.detail)}" for row in rows)])


def sum_of(reports: Sequence[TaskReport]) -> str:
    """How many tasks, errors and warnings there are."""
    errors, warnings = (sum(report.count(s) for report in reports) for s in (Status.ERROR, Status.WARNING))
    tasks = f"{len(reports)} task{'s' * (len(reports) != 1)}"
    return f"{tasks}: {_number(errors, 'error')}, {_number(warnings, 'warning')}"


def as_json(target: str, reports: Sequence[TaskReport]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "target": target,
        "errors": sum(report.count(Status.ERROR) for report in reports),
        "warnings": sum(report.count(Status.WARNING) for report in reports),
        "tasks": [
            {
                "task": report.name,
                "seed": report.seed,
                "checks": [{"name": f.name, "status": str(f.status), "detail": f.detail} for f in report.findings],
                "first_prompt": [{"role": role, "text": text} for role, text in shown_messages(report.first_prompt)],
            }
            for report in reports
        ],
    }


def _number(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'s' * (count != 1)}"


def _colored(finding: Finding) -> str:
    return paint(f"{finding.status:<8}", COLORS[finding.status])
