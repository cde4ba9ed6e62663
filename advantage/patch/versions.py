"""Detects the framework, by inspecting its loss module, and what the patch has to do in it.

miles lacks `--custom-advantage-function-path`. slime up to v0.3.1 and miles whiten without context parallelism.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from advantage.errors import UnsupportedFrameworkError

SUPPORTED = "slime v0.3.0, v0.3.1 and main (August 2026), and miles-rl 0.0.2"

_LOSS = {"slime": "slime.backends.megatron_utils.loss", "miles": "miles.backends.training_utils.loss"}
_ACTOR = {"slime": "slime.backends.megatron_utils.actor", "miles": "miles.backends.megatron_utils.actor"}
MODEL = {"slime": "slime.backends.megatron_utils.model"}
_PARAMETERS = {
    "compute_advantages_and_returns": ("args", "rollout_data"),
    "value_loss_function": ("args", "batch", "logits", "sum_of_sample_mean"),
}


@dataclass(frozen=True)
class Framework:
    """An installed framework that the patch supports."""

    name: str
    """`slime` or `miles`."""
    loss: ModuleType
    """Where advantages and the value loss are computed."""
    actor: ModuleType | None
    """The training process's module, which imports functions of `loss` by name; None if it is not loaded."""
    model: ModuleType | None
    """Where the forward passes are; None if it is not loaded."""
    has_flag: bool
    """Whether its `compute_advantages_and_returns` calls `args.custom_advantage_function_path`."""
    whitens_all_ranks: bool
    """Whether it whitens over data and context parallelism together."""


def find_framework() -> Framework:
    """Find the framework that runs or is installed; raises UnsupportedFrameworkError for another version."""
    names = [name for name in _LOSS if _ACTOR[name] in sys.modules or _LOSS[name] in sys.modules]
    names = names or [name for name in _LOSS if importlib.util.find_spec(name) is not None]
    if not names:
        raise UnsupportedFrameworkError(f"neither slime nor miles is installed; supported are {SUPPORTED}")
    try:
        loss = importlib.import_module(_LOSS[names[0]])
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(names[0]):
            raise
        raise UnsupportedFrameworkError(
            f"this {names[0]} has no module {_LOSS[names[0]]}; supported are {SUPPORTED}"
        ) from error
    for function, parameters in _PARAMETERS.items():
        known = original(getattr(loss, function, None))
        found = tuple(inspect.signature(known).parameters) if callable(known) else None
        if found is None or found[: len(parameters)] != parameters:
            raise UnsupportedFrameworkError(
                f"{names[0]}'s {loss.__name__}.{function} is {'missing' if found is None else f'called with {found}'}, "
                f"expected parameters {parameters}; supported are {SUPPORTED}"
            )
    dispatch = getattr(loss, "loss_function", None)
    if dispatch is None or "value_loss_function" not in dispatch.__code__.co_names:
        raise UnsupportedFrameworkError(
            f"{names[0]}'s {loss.__name__}.loss_function does not call value_loss_function by that name; "
            f"supported are {SUPPORTED}"
        )
    compute = original(loss.compute_advantages_and_returns)
    has_flag = "custom_advantage_function_path" in compute.__code__.co_names
    if names[0] == "slime" and not has_flag:
        raise UnsupportedFrameworkError(
            f"this slime has no --custom-advantage-function-path (it came with v0.3.0); supported are {SUPPORTED}"
        )
    whitens = any("with_context_parallel" in x for x in compute.__code__.co_consts if isinstance(x, tuple))
    actor, model = (sys.modules.get(modules.get(names[0], "")) for modules in (_ACTOR, MODEL))
    return Framework(names[0], loss, actor, model, has_flag, whitens)


def original(function: Any) -> Any:
    """Return the framework's function that the patch replaced, or the function itself."""
    return getattr(function, "__advantage_original__", function)


def replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a module's function by `make(function)`, once."""
    old = getattr(module, name)
    if original(old) is old:
        new = make(old)
        new.__advantage_original__ = old
        setattr(module, name, new)


def wrap(module: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a module's function by `around`, which is called with the old function and its arguments; once."""

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def wrapped(*args: Any, **named: Any) -> Any:
            return around(old, *args, **named)

        return wrapped

    replace(module, name, make)
