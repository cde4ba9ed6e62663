"""Starts an agent's program, on this machine or in a sandbox, and ends it with everything that it started."""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from envs.agent.session import End
from envs.errors import ConfigError, EnvironmentFault
from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.supervise import KeptOutput, Limits
from envs.tools import reaper

KEPT_BYTES = 16384
"""Of what the program writes, this much is kept of the beginning and of the end."""
END_S = 30.0
_HERE = Path(__file__).parent
_INSIDE = "/run/agent"
_PORT = 8000
"""Port of the model's address inside a sandbox, whose network is separate."""
_SCRIPT = ("-I", "-S")
"""Options of Python for a script that needs only the standard library."""


class Program(abc.ABC):
    """A running program; `on_end` is called from a thread when nothing of it is alive any more."""

    def __init__(self, on_end: Callable[[End], None]) -> None:
        self._on_end = on_end
        self._thread = threading.Thread(target=self._watch, name="agent", daemon=True)
        self._thread.start()

    @abc.abstractmethod
    def _run(self) -> End:
        """Return when nothing of the program is alive."""

    @abc.abstractmethod
    def _interrupt(self) -> None:
        """Make `_run` return soon."""

    def _watch(self) -> None:
        try:
            end = self._run()
        except Exception as error:  # whatever it is, the environment must not wait for the program
            end = End(-1, f"{type(error).__name__}: {error}")
        self._on_end(end)

    def stop(self) -> None:
        """End the program, and return when nothing of it is alive.

        Raises:
            EnvironmentFault: it cannot be ended, as with a dead network disk.
        """
        self._interrupt()
        self._thread.join(END_S)
        if self._thread.is_alive():
            raise EnvironmentFault(f"the agent's program cannot be ended within {END_S:g} s")


class Plain(Program):
    """A program on this machine, under a reaper that ends everything that it started."""

    def __init__(
        self, argv: Sequence[str], folder: Path, variables: Mapping[str, str], on_end: Callable[[End], None]
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *_SCRIPT, reaper.__file__, "0", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(variables),
            start_new_session=True,
        )
        super().__init__(on_end)

    def _run(self) -> End:
        assert self._process.stdout is not None
        kept = KeptOutput(KEPT_BYTES)
        while data := self._process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            kept.add(data)
        self._process.stdout.close()
        return End(self._process.wait(), kept.text())

    def _interrupt(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


class Sandboxed(Program):
    """A program in a bubblewrap sandbox, whose only way out is the socket of the model's server."""

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        python: Path,
        limits: Limits,
        socket: Path,
        on_end: Callable[[End], None],
    ) -> None:
        places = ((socket, f"{_INSIDE}/model.sock"), (_HERE / "forward.py", f"{_INSIDE}/forward.py"))
        self._sandbox = Sandbox(folder, python, limits, places, tuple(variables.items()))
        forward = [str(python), *_SCRIPT, f"{_INSIDE}/forward.py", f"{_INSIDE}/model.sock", str(_PORT)]
        self._argv = [*forward, *argv]
        self._stop = threading.Event()
        super().__init__(on_end)

    def _run(self) -> End:
        outcome = self._sandbox.run(self._argv, stop=self._stop)
        return End(outcome.returncode, outcome.output, outcome.stopped)

    def _interrupt(self) -> None:
        self._stop.set()


def find_program(name: str, path: str, folder: Path) -> str:
    """The program's path; a relative path with a slash is looked up in `folder`.

    Raises:
        ConfigError: there is none.
    """
    found = name if "/" in name and (folder / name).exists() else shutil.which(name, path=path)
    if found is None:
        raise ConfigError(f"env.command: program {name!r} was not found next to env.python, in PATH or in env.workdir")
    return found


def addresses(port: int | None, key: str) -> dict[str, str]:
    """The variables by which clients find the model; with port None, those of a sandbox."""
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
