"""Errors that an environment raises, named by what went wrong, and how an error is told in one
line.

`rollout.errors` holds the whole model.
"""

import difflib
import inspect
import linecache
import logging
import reprlib
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import slime_verlog
from slime_verlog import ConfigError as ConfigError
from slime_verlog import MissingDependencyError as MissingDependencyError
from slime_verlog import SlimeVerlogError

logger = logging.getLogger("envs")
_OURS = Path(slime_verlog.__file__).resolve().parent
_PACKAGES = ("advantage", "embedded", "envs", "inspection", "rollout", "slime_verlog.py")
_STANDARD = sysconfig.get_paths()["stdlib"]
MAX_TEXT_CHARS = 400
"""Characters of an error's text that a sentence quotes."""


class EnvironmentFault(SlimeVerlogError, RuntimeError):
    """An environment broke (raised, hung or died); the agent did nothing wrong."""


class ToolError(SlimeVerlogError, RuntimeError):
    """A tool was registered wrongly, or broke while it ran."""


class JudgeError(SlimeVerlogError, RuntimeError):
    """The judge did not give a usable verdict."""


class EpisodeOverError(SlimeVerlogError, RuntimeError):
    """`step` was called before `reset` or after the episode's end."""


warned: list[str] = []
"""What environments have warned of in this process."""


def warn_once(sentence: str) -> None:
    """Log a warning about an environment, once per process; `slime-verlog check` shows it as a
    row."""
    if sentence not in warned:
        warned.append(sentence)
        logger.warning(sentence)


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", *, n: int = 3, cutoff: float = 0.6
) -> str:
    """Return the end of an error about an unknown name: its nearest known names, or `otherwise` if
    none is near."""
    near = difflib.get_close_matches(name, list(known), n=n, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def check_known(name: str, known: Iterable[str], wrong: str, otherwise: str, **near: Any) -> None:
    """Raise ConfigError, `wrong` with a hint as by `did_you_mean`, unless the name is a known
    one."""
    if name not in known:
        raise ConfigError(f"{wrong}; {did_you_mean(name, known, otherwise, **near)}")


def describe(error: BaseException, own: str = "") -> str:
    """Return type, text and place of an error on one line; the file or module `own` counts as the
    user's code."""
    text = one_line(error.msg if isinstance(error, SyntaxError) else text_of(error))
    place = place_of(error, own)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{said} at {place}" if place else said


def place_of(error: BaseException, own: str = "") -> str:
    """`FILE:LINE` and line of the innermost frame in the user's code, else in installed code; empty
    if unknown."""
    place: Any = error if isinstance(error, SyntaxError) and error.lineno else _frame_of(error, own)
    if place is None or not place.filename:
        return ""
    linecache.checkcache(place.filename)
    code = one_line(linecache.getline(place.filename, place.lineno))
    return f"{place.filename}:{place.lineno}" + (f" (`{code}`)" if code else "")


def advice_about(error: BaseException, own: str = "") -> str:
    """Return what to do about an error at `place_of`, which depends on whose line that is."""
    if advice := thread_advice(error):
        return advice
    frame = _frame_of(error, own)
    if (
        frame is None
        or isinstance(error, SyntaxError)
        or _is_users(frame.filename)
        or frame.filename == _file_of(own)
    ):
        return "correct this line"
    if _is_ours(frame.filename):
        return "this line calls the environment or reads what it returned: correct the environment"
    return "the line belongs to an installed package: correct what calls it or what it is given"


def thread_advice(error: BaseException) -> str:
    """Return what to do about an error that the main thread would not have; empty in the main
    thread."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main or "main thread" not in text_of(error):
        return ""
    return "env_backend: inline plays outside of the main thread; set env_backend: process"


def _frame_of(error: BaseException, own: str) -> traceback.FrameSummary | None:
    # Compiled modules name files that are not there, such as numpy/random/_generator.pyx.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_file()]
    file = _file_of(own)

    def rank(frame: traceback.FrameSummary) -> int:
        name = frame.filename
        if name == file or _is_users(name):
            return 0
        return 2 if _is_ours(name) else 1 if _is_package(name) else 3

    return min(reversed(frames), key=rank, default=None)


def _file_of(own: str) -> str | None:
    """Return the file of an environment's path, unless it is one of ours."""
    file = (
        str(Path(own).resolve())
        if own.endswith(".py")
        else getattr(sys.modules.get(own), "__file__", None)
    )
    return None if file is None or _is_ours(file) else file


def place_of_method(instance: Any, name: str) -> str:
    """`FILE:LINE` where the instance's class defines the method, or the class itself if it inherits
    the method."""
    kind = type(instance)
    method = _source(getattr(kind, name, None))
    owner = _source(kind)
    found = method if method and _is_users(method[0]) else owner
    return f"{found[0]}:{found[1]}" if found else ""


def place_of_function(function: Any) -> str:
    """`FILE:LINE` where a function is defined; its name if that is not known."""
    found = _source(inspect.unwrap(function))
    return f"{found[0]}:{found[1]}" if found else reprlib.repr(function)


def _source(thing: Any) -> tuple[str, int] | None:
    try:
        file = inspect.getsourcefile(thing)
        line = inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):
        return None
    return (file, line) if file else None


def text_of(error: BaseException) -> str:
    """Return the error's text, or a note if its `__str__` raises."""
    try:
        return str(error)
    except BaseException as second:
        return f"(its text cannot be shown: {type(second).__name__})"


def one_line(text: str) -> str:
    """Return the text without line breaks, cut at `MAX_TEXT_CHARS` characters."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " ..."


def _is_package(file: str) -> bool:
    return "site-packages" in Path(file).parts or "dist-packages" in Path(file).parts


def _is_ours(file: str) -> bool:
    return any(Path(file).is_relative_to(_OURS / name) for name in _PACKAGES)


def _is_users(file: str) -> bool:
    return not (_is_ours(file) or _is_package(file) or file.startswith(_STANDARD))
