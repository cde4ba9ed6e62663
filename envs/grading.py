"""Finds the final answer in what the model wrote and holds it against the reference."""

from __future__ import annotations

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
from collections import OrderedDict
from collections.abc import Callable, Mapping

from envs.errors import ConfigError, EnvironmentFault, MissingDependencyError
from envs.loading import load_attribute
from envs.questions import Question

Grade = Callable[[str, Question], float | tuple[float, str]]
"""A grader: answer and question to a score, 1 for right; or to a score and words for the model."""

START_S = 120.0
LONGEST = 500
"""Characters of an answer that could still be a formula."""

_MARKER = re.compile(r"answer\s{0,3}(?:is\s{0,3})?[:=]", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def load_grader(name: str) -> Grade:
    """`exact`, `math`, or the import path of a function of one's own.

    Raises:
        ConfigError: the name is unknown or leads nowhere.
        MissingDependencyError: `math` without math-verify.
    """
    if name in GRADERS:
        if name == "math" and importlib.util.find_spec("math_verify") is None:
            raise MissingDependencyError(
                "env.grader math needs math-verify; install it with: pip install 'math-verify[antlr4_13_2]'"
            )
        return GRADERS[name]
    if "." not in name and ":" not in name:
        raise ConfigError(f"env.grader must be {', '.join(GRADERS)} or the import path of a function, got {name!r}")
    grader = load_attribute(name, "env.grader")
    if not callable(grader):
        raise ConfigError(f"env.grader: {name} is {grader!r}, not a function of (answer, question)")
    return grader


def find_answer(text: str, start: int = 0) -> tuple[str, tuple[int, int]]:
    """The final answer after `start` and its [start, end): the last `\\boxed{}`, else what follows the last
    `Answer:` on its line, else everything."""
    boxed = _last_boxed(text, start)
    if boxed is not None:
        span = boxed
    else:
        marks = list(_MARKER.finditer(text, start))
        begin = marks[-1].end() if marks else start
        end = text.find("\n", begin + len(text[begin:]) - len(text[begin:].lstrip())) if marks else -1
        span = (begin, end if end >= 0 else len(text))
    answer = text[slice(*span)]
    begin = span[0] + len(answer) - len(answer.lstrip())
    return answer.strip(), (begin, begin + len(answer.strip()))


def _last_boxed(text: str, start: int) -> tuple[int, int] | None:
    """The [start, end) inside the braces of the last complete `\\boxed{...}`."""
    mark = text.rfind("\\boxed{")
    for _ in range(8):  # more broken ones in a row are gibberish
        if mark < start:
            return None
        begin = mark + len("\\boxed{")
        depth = 1
        for position in range(begin, min(len(text), begin + 4 * LONGEST)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return begin, position
        mark = text.rfind("\\boxed{", 0, mark)
    return None


def exact(answer: str, question: Question) -> float:
    """1 if the answer equals the reference, or one of several, up to case, articles, punctuation and white space."""
    references = question.answer if isinstance(question.answer, list | tuple) else [question.answer]
    return float(_normal(answer) in {_normal(str(reference)) for reference in references})


def _normal(text: str) -> str:
    kept = "".join(c for c in unicodedata.normalize("NFKC", text).lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def math(answer: str, question: Question) -> float:
    """1 if the answer has the reference's value, however it is written; see `math_server`."""
    if not answer or len(answer) > LONGEST:
        return 0.0
    return float(_checker().equal(str(question.answer), answer))


GRADERS: Mapping[str, Grade] = {"exact": exact, "math": math}


@functools.lru_cache(maxsize=1)
def _checker() -> MathChecker:
    return MathChecker()


class MathChecker:
    """A comparison process that is started again when an expression was too much for it."""

    def __init__(self, most_kept: int = 10_000) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self._most_kept = most_kept

    def equal(self, reference: str, answer: str) -> bool:
        """Whether both have the same value; False where that cannot be told in time.

        Raises:
            EnvironmentFault: the process does not start.
        """
        key = (reference, answer)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._ask(reference, answer)
                if len(self._kept) > self._most_kept:
                    self._kept.popitem(last=False)
            return self._kept[key]

    def _ask(self, reference: str, answer: str) -> bool:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([reference, answer]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.wait()
            return False
        reply = self._process.stdout.readline()  # type: ignore[union-attr]
        if not reply:
            self._process.wait()
            return False
        return json.loads(reply)

    def _start(self) -> None:
        # -P keeps the current folder's files from shadowing what the process imports.
        command = [sys.executable, "-P", "-c", _BOOT.format(path=sys.path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        if not ready or json.loads(self._process.stdout.readline() or "null") != "ready":  # type: ignore[union-attr]
            self._process.kill()
            raise EnvironmentFault(
                f"the process that compares expressions did not start within {START_S:g} s; run "
                f"{sys.executable} -m envs.math_server to see why"
            )

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


_BOOT = "import sys; sys.path[:] = {path!r}; from envs.math_server import main; main()"
