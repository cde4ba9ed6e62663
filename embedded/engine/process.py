"""The engine in a process beside the trainer's, so that both compute at the same time.

Weights go to the engine as slime's disk transport sends them: pause, which aborts or retracts the
responses in flight, flush, load, continue.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from embedded.engine.decoder import Weights, write_policy
from embedded.engine.engine import HOST, EngineOptions
from rollout.errors import ConfigError, EngineError


class EngineProcess(AbstractContextManager["EngineProcess"]):
    """A context manager around a child process that serves one model; it ends with this process,
    however that ends."""

    def __init__(self, options: EngineOptions) -> None:
        """Start the child and return at once; it loads its model meanwhile, and `port` waits for
        that."""
        self._model = options.model_path
        self.host = HOST
        self._port = 0
        self._weights = Path(tempfile.mkdtemp(prefix="slime-verlog-engine-"))
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, options.model_dump_json(), str(self._weights)],
            stdin=subprocess.PIPE,  # closed when this process ends, which ends the child
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C reaches this process alone, which then ends the child
        )

    @property
    def port(self) -> int:
        """The port that the engine listens on; raises ConfigError or EngineError if the model
        cannot be served."""
        if not self._port:
            assert self._process.stdout is not None
            said = json.loads(self._process.stdout.readline() or "{}")
            if "error" in said:
                raise ConfigError(said["error"])
            if "port" not in said:
                raise EngineError(self._obituary(), "refused")
            self._port = said["port"]
        return self._port

    def update_weights(self, state: Weights, version: str, on_update: str = "abort") -> None:
        """Serve these weights, under Hugging Face names, as this version, or raise EngineError or
        CheckpointError.

        `on_update`: whether responses in flight `abort` or `continue` with the new weights.
        """
        folder = self._weights / "policy"
        write_policy(self._model, state, folder)
        self._post("/pause_generation", {"mode": "retract" if on_update == "continue" else "abort"})
        while self._post("/flush_cache", refused=400) == 400:
            time.sleep(0.002)  # flushing is refused until the last response is aborted or retracted
        self._post(
            "/update_weights_from_disk", {"model_path": str(folder), "weight_version": version}
        )
        self._post("/continue_generation")

    def cpu_s(self) -> float:
        """Ask for the CPU seconds of the engine's process so far."""
        return self._call("GET", "/server_info")[1]["process_cpu_s"]

    def _post(self, path: str, body: Mapping[str, Any] | None = None, refused: int = 200) -> int:
        """Send a control request, and return its status: 200, or `refused`."""
        status, said = self._call("POST", path, body)
        if status not in (200, refused):
            raise EngineError(
                f"the engine refused {path} (HTTP {status}): {said}", f"http_{status}"
            )
        return status

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Any]:
        # Loading a large model takes long on a busy machine.
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600.0)
        try:
            connection.request(
                method, path, json.dumps(body or {}), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            said = response.read()
        except OSError as error:
            raise EngineError(
                f"the engine did not answer {path}: {error}", "connection_lost"
            ) from error
        finally:
            connection.close()
        return response.status, json.loads(said) if response.headers.get_content_type().endswith(
            "json"
        ) else said

    def _obituary(self) -> str:
        code = self._process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the engine's process ended {how}; if it printed no reason above, the system may have run out of memory"

    def close(self) -> None:
        """End the child and delete its weights. Safe to call twice."""
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._weights, ignore_errors=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineError):
            with suppress(subprocess.TimeoutExpired):  # a connection may break a moment earlier
                self._process.wait(timeout=1)
        lost = (
            self._obituary()
            if isinstance(error, EngineError) and self._process.returncode is not None
            else None
        )
        self.close()
        if lost:
            raise EngineError(lost, "refused") from error


CHILD = "from embedded.engine.process import serve_until_stdin_closes; serve_until_stdin_closes()"


def serve_until_stdin_closes() -> None:
    """Serve the options in `argv[1]`, reply with the port or the error, and delete the folder
    `argv[2]` at the end."""
    from transformers.utils import logging

    from embedded.engine.server import EngineServer

    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the reply
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    try:
        server = EngineServer(EngineOptions.model_validate_json(sys.argv[1]))
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), file=reply, flush=True)
        raise SystemExit(1) from None
    print(json.dumps({"port": server.port}), file=reply, flush=True)
    sys.stdin.buffer.read()
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    server.close()
