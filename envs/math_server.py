"""Decides in a process of its own whether two mathematical expressions are equal.

Some expressions take for ever (`9^{9^{9^9}}`), and nothing inside of Python can stop them; here the kernel ends the
process when a comparison takes too long, and its parent starts another.

One JSON object a line: in `[reference, answer]`, out `true` or `false`; the first line out says that it is ready.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys

from envs.math_text import read_result

SECONDS = 5.0
MEMORY_BYTES = 4 << 30


def equal(reference: str, answer: str) -> bool:
    """Whether two LaTeX or plain expressions have the same value; notation does not matter.

    A unit counts where both have one. 25% is 0.25; a reference in percent takes the bare number as well.
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

    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (reference, answer))
    return bool(verify(gold, given, timeout_seconds=None))


def main() -> None:
    """Answer lines until stdin closes."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        import math_verify  # noqa: F401 - the slow import belongs before "ready"

        print(json.dumps("ready"), file=replies, flush=True)
        for line in sys.stdin:
            reference, answer = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                result = equal(reference, answer)
            except Exception:  # a parser that stumbles over gibberish has decided: not equal
                result = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(result), file=replies, flush=True)


if __name__ == "__main__":
    main()
