"""Starts an agent's program, on this machine or in a sandbox, and ends it with everything that it
started."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from envs.agent.session import End
from envs.errors import ConfigError, EnvironmentFault
from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.supervise import KeptOutput
from envs.tools import reaper

KEPT_BYTES = 16384
"""Of what the program writes, this much is kept of the beginning and of the end."""
END_S = 30.0
MAX_WORD_BYTES = 130_000
"""Linux takes 128 KiB for an argument, or for a variable with its name."""
_INSIDE = "/run/agent"
_PORT = 8000
"""Port of the model's address inside a sandbox, whose network is separate."""
_SCRIPT = ("-I", "-S")
"""Options of Python for a script that needs only the standard library."""


class Program:
    """A running program.

    Args:
        run: returns when nothing of the program is alive.
        interrupt: makes `run` return soon.
        on_end: called from a thread when nothing of the program is alive.
    """

    def __init__(
        self, run: Callable[[], End], interrupt: Callable[[], object], on_end: Callable[[End], None]
    ) -> None:
        self._run = run
        self._interrupt = interrupt
        self._on_end = on_end
        self._thread = threading.Thread(target=self._watch, name="agent", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            end = self._run()
        except Exception as error:  # whatever it is, the environment must not wait for the program
            end = End(-1, f"{type(error).__name__}: {error}")
        self._on_end(end)

    def stop(self) -> None:
        """End the program and all that it started; raises EnvironmentFault if it cannot be
        ended."""
        with contextlib.suppress(OSError):
            self._interrupt()
        self._thread.join(END_S)
        if self._thread.is_alive():
            raise EnvironmentFault(f"the agent's program cannot be ended within {END_S:g} s")


def start_plain(
    argv: Sequence[str], folder: Path, variables: Mapping[str, str], on_end: Callable[[End], None]
) -> Program:
    """Start a program on this machine, under a reaper that ends everything that it started."""
    process = subprocess.Popen(
        [sys.executable, *_SCRIPT, reaper.__file__, "0", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=dict(variables),
        start_new_session=True,
    )
    stdin = process.stdin
    stdout = process.stdout
    assert stdin is not None and stdout is not None

    def run() -> End:
        kept = KeptOutput(KEPT_BYTES)
        with stdout:
            while data := stdout.read1(1 << 16):  # type: ignore[attr-defined]
                kept.add(data)
        return End(process.wait(), kept.text())

    return Program(run, stdin.close, on_end)


def start_sandboxed(
    argv: Sequence[str],
    sandbox: Sandbox,
    socket: Path,
    variables: Mapping[str, str],
    on_end: Callable[[End], None],
) -> Program:
    """Start a program in a bubblewrap sandbox, whose only way out is the socket of the model's
    server."""
    places = (
        (socket, f"{_INSIDE}/model.sock"),
        (Path(__file__).with_name("forward.py"), f"{_INSIDE}/forward.py"),
    )
    sandbox = replace(sandbox, readable=places, variables=tuple(variables.items()))
    forward = [
        str(sandbox.python),
        *_SCRIPT,
        f"{_INSIDE}/forward.py",
        f"{_INSIDE}/model.sock",
        str(_PORT),
    ]
    stop = threading.Event()

    def run() -> End:
        outcome = sandbox.run([*forward, *argv], stop=stop)
        return End(outcome.returncode, outcome.output, outcome.stopped)

    return Program(run, stop.set, on_end)


def check_words(argv: Sequence[str], variables: Mapping[str, str]) -> None:
    """Raise EnvironmentFault for text that no program can be started with: too long, or not a
    text."""
    words = [("a word of env.command", word) for word in argv]
    for place, text in [*words, *variables.items()]:
        try:
            size = len(os.fsencode(text))
        except UnicodeEncodeError as error:
            raise EnvironmentFault(
                f"{place} holds half of a surrogate pair; leave it out"
            ) from error
        if "\0" in text:
            raise EnvironmentFault(f"{place} holds a null character; leave it out")
        if size > MAX_WORD_BYTES:
            raise EnvironmentFault(
                f"{place} has {size} bytes, and a program can be started with {MAX_WORD_BYTES}; "
                "let env.prepare write the text to a file of the work folder"
            )


def find_program(name: str, path: str, folder: Path) -> str:
    """Return the program's path; one with a slash is looked up in `folder`. Raises ConfigError if
    it is missing."""
    if "/" in name and (folder / name).exists():
        return name
    found = shutil.which(name, path=path) if "/" not in name else None
    if found is None:
        raise ConfigError(
            f"env.command: program {name!r} was not found next to env.python, in PATH or in "
            "env.workdir"
        )
    return found


def addresses(port: int | None, key: str) -> dict[str, str]:
    """Return the variables by which clients find the model; with port None, those of a sandbox."""
    base = f"http://127.0.0.1:{_PORT if port is None else port}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def search_path(python: Path) -> str:
    """PATH of the program: the interpreter's folder first."""
    return os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
