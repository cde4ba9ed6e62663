"""Finds the final answer in the model's text and compares it with the reference."""

import functools
import importlib.util
import json
import re
import select
import string
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from envs.errors import ConfigError, EnvironmentFault, MissingDependencyError
from envs.loading import load_attribute
from envs.questions import Question

Grade = Callable[[str, Question], float | tuple[float, str]]
"""A grader: takes answer and question, returns a score, 1 for right, or a score and feedback for
the model."""

START_S = 120.0
"""Seconds that the comparison process may take to start."""
MAX_CHARS = 500
"""Longest answer that is compared as an expression."""

_MARKER = re.compile(r"answer\s{0,3}(?:is\s{0,3})?[:=]", re.IGNORECASE)
_IGNORED = re.compile(rf"(?![-./][.$]?\d)(?!(?<=\d)[^,_']\d)[{re.escape(string.punctuation)}]")
"""Punctuation, except in numbers: a sign, point or slash before a digit, and other marks than
commas between digits."""
_FIRST_LINE = re.compile(r"\s*.*")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def load_grader(name: str) -> Grade:
    """Return `exact`, `math` or the function at an import path; raises ConfigError for another
    value."""
    if name in GRADERS:
        if name == "math" and importlib.util.find_spec("math_verify") is None:
            how = "install it with: pip install 'math-verify[antlr4_13_2]'"
            raise MissingDependencyError(f"env.grader math needs math-verify; {how}")
        return GRADERS[name]
    if "." not in name and ":" not in name:
        raise ConfigError(
            f"env.grader must be {', '.join(GRADERS)} or the import path of a function, got "
            f"{name!r}"
        )
    grader: Grade = load_attribute(name, "env.grader")
    if not callable(grader):
        raise ConfigError(f"env.grader: {name} is {grader!r}, not a function of (answer, question)")
    return grader


def find_answer(text: str, start: int = 0) -> tuple[str, tuple[int, int]]:
    """Return the final answer after position `start`, and its span [start, end).

    The answer is the content of the last `\\boxed{}`, or the rest of the line after the last
    `Answer:`, or everything.
    """
    span = _last_boxed(text, start)
    if span is None:
        marks = list(_MARKER.finditer(text, start))
        span = (marks[-1].end() if marks else start, len(text))
        if marks and (line := _FIRST_LINE.match(text, span[0])):
            span = line.span()
    answer = text[slice(*span)].lstrip()
    begin = span[1] - len(answer)
    answer = answer.rstrip()
    return answer, (begin, begin + len(answer))


def _last_boxed(text: str, start: int) -> tuple[int, int] | None:
    """Return the [start, end) inside the braces of the last complete `\\boxed{...}`."""
    mark = text.rfind("\\boxed{")
    for _ in range(8):  # bounds the time for texts with many unclosed boxes
        if mark < start:
            return None
        begin = mark + len("\\boxed{")
        depth = 1
        for position in range(begin, min(len(text), begin + 4 * MAX_CHARS)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return begin, position
        mark = text.rfind("\\boxed{", 0, mark)
    return None


def exact(answer: str, question: Question) -> float:
    """Return 1 if the answer equals a reference, ignoring case, articles, punctuation and white
    space, else 0.

    Not ignored are the signs of numbers, and what would leave nothing to compare, as in the answers
    `A` and `<`.
    """
    references = question.answer if isinstance(question.answer, list | tuple) else [question.answer]
    return float(_normal(answer) in {_normal(str(reference)) for reference in references})


def _normal(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).lower().strip()
    kept = " ".join(_IGNORED.sub("", folded).split())
    return " ".join(_ARTICLES.sub(" ", kept).split()) or kept or folded


def math(answer: str, question: Question) -> float:
    """Return 1 if the answer has the same value as the reference in any notation, else 0; see
    `math_server.equal`."""
    if not answer or len(answer) > MAX_CHARS:
        return 0.0
    return float(_CHECKER.equal(str(question.answer), answer))


class MathChecker:
    """Compares expressions in another process, which is restarted after a comparison that it could
    not end."""

    def __init__(self) -> None:
        self._process: Any = None
        self._lock = threading.Lock()
        self._cached = functools.lru_cache(10_000)(self._ask)

    def equal(self, reference: str, answer: str) -> bool:
        """Return whether both have the same value; False if the comparison takes too long."""
        with self._lock:
            return self._cached(reference, answer)

    def _ask(self, reference: str, answer: str) -> bool:
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        try:
            self._process.stdin.write(json.dumps([reference, answer]) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self._process.wait()
        return bool(reply) and json.loads(reply)

    def close(self) -> None:
        """End the process; the next comparison starts another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


def _start() -> Any:
    # -P keeps the current folder's files from shadowing what the process imports.
    command = [sys.executable, "-P", "-c", _BOOT.format(path=sys.path)]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    process: Any = subprocess.Popen(command, **pipes, text=True)
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    if not ready or json.loads(process.stdout.readline() or "null") != "ready":
        process.kill()
        raise EnvironmentFault(
            f"the process that compares expressions did not start within {START_S:g} s; run "
            f"{sys.executable} -m envs.questions.math_server to see why"
        )
    return process


_CHECKER = MathChecker()
GRADERS: Mapping[str, Grade] = {"exact": exact, "math": math}
_BOOT = "import sys; sys.path[:] = {path!r}; from envs.questions.math_server import main; main()"
