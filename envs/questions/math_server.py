"""A process that decides whether two mathematical expressions are equal.

Some comparisons never end (`9^{9^{9^9}}`) and cannot be interrupted from Python. When one takes too long, the kernel
ends this process, and its parent starts another.

The process reads one JSON list `[reference, answer]` per line and writes `true` or `false`. Its first line is "ready".
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys

from envs.questions.math_text import read_result

SECONDS = 5.0
"""Time limit of one comparison."""
MEMORY_BYTES = 4 << 30
"""Memory limit of the process."""


def equal(reference: str, answer: str) -> bool:
    """Whether two expressions, in LaTeX or plain text, have the same value.

    Units are compared only if both sides have one. 25% equals 0.25; a reference of 25% also accepts the bare 25.
    """
    gold, given = read_result(reference), read_result(answer)
    if gold.unit and given.unit and gold.unit != given.unit:
        return False
    if "percent" not in (gold.unit, given.unit) or gold.unit == given.unit:
        return _same(gold.expression, given.expression)
    if given.unit == "percent":
        return _same(gold.expression, f"({given.expression})/100")
    return _same(gold.expression, given.expression) or _same(f"({gold.expression})/100", given.expression)


def _same(reference: str, answer: str) -> bool:
    from math_verify import parse, verify

    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (reference, answer))
    return bool(verify(gold, given, timeout_seconds=None))


def main() -> None:
    """Answer lines until stdin closes."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        import math_verify  # noqa: F401 - the slow import must end before "ready"

        print(json.dumps("ready"), file=replies, flush=True)
        for line in sys.stdin:
            reference, answer = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                result = equal(reference, answer)
            except Exception:  # what the parser cannot read is not equal
                result = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(result), file=replies, flush=True)


if __name__ == "__main__":
    main()
