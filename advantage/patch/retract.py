"""`on_update: continue`: responses in flight survive new weights, and their next tokens are the new weights'.

slime pauses its engines with an empty request, which SGLang takes as "abort everything". With mode `retract`, SGLang
keeps the requests and drops their cache. It computes prompt and response so far again with the new weights, and says in
`weight_versions` which weights wrote which token. slime's pause has no mode, but its engine actors have a method that
posts any request, so the pause is sent through that one.
"""

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from advantage.errors import UnsupportedFrameworkError
from advantage.patch.versions import Framework, replace

_UPDATERS = {
    "full": ("update_weight_from_distributed", "UpdateWeightFromDistributed"),
    "delta": ("update_weight_from_disk_delta", "UpdateWeightFromDiskDelta"),
}
"""By `--update-weight-mode`: slime's class that pauses the engines from the trainer. With `--colocate`, no response is
in flight at an update."""


def install_retraction(mode: str | None, framework: Framework) -> None:
    """Make the process that pushes weights pause its engines with mode `retract`; `mode` is `--update-weight-mode`.

    Raises UnsupportedFrameworkError if the framework pushes weights in another way.
    """
    module, name = _UPDATERS[mode or "full"]
    path = f"{framework.name}.backends.megatron_utils.update_weight.{module}"
    try:
        replace(getattr(importlib.import_module(path), name), "connect_rollout_engines", _connecting)
    except (ImportError, AttributeError) as error:
        raise UnsupportedFrameworkError(
            f"on_update: continue does not know how this {framework.name} pushes weights ({error}); use abort"
        ) from error


def _connecting(connect: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(connect)
    def connected(self: Any, rollout_engines: Any, *rest: Any, **named: Any) -> None:
        connect(self, rollout_engines, *rest, **named)
        self.rollout_engines = [_RetractingEngine(engine) for engine in self.rollout_engines]

    return connected


class _RetractingEngine:
    """The handle of slime's engine actor, except that `pause_generation` retracts what is in flight."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        pause = functools.partial(engine._make_request.remote, "pause_generation", {"mode": "retract"})
        self.pause_generation = SimpleNamespace(remote=pause)

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._engine, name)
