"""Finds slime's modules, and refuses a version in which the patch would do something else.

slime main whitens over data and context parallelism together, v0.3.1 without context parallelism.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

from advantage.errors import UnsupportedFrameworkError

SUPPORTED = "slime v0.3.1 and main (August 2026)"

LOSS = "slime.backends.megatron_utils.loss"
ACTOR = "slime.backends.megatron_utils.actor"
MODEL = "slime.backends.megatron_utils.model"
_PARAMETERS = {
    "compute_advantages_and_returns": ("args", "rollout_data"),
    "value_loss_function": ("args", "batch", "logits", "sum_of_sample_mean"),
}


@dataclass(frozen=True)
class Slime:
    """The modules of a slime that the patch supports."""

    loss: ModuleType
    """Where advantages and the losses are computed."""
    actor: ModuleType | None
    """The training process's module, which imports functions of `loss` by name; None if it is not
    loaded."""
    model: ModuleType | None
    """Where the forward passes are; None if it is not loaded."""
    whitens_all_ranks: bool
    """Whether it whitens over data and context parallelism together."""


def find_slime() -> Slime:
    """Return slime's modules; raises UnsupportedFrameworkError without slime, or for an unknown
    version."""
    try:
        loss = importlib.import_module(LOSS)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("slime"):
            raise
        raise UnsupportedFrameworkError(
            f"there is no module {LOSS}; supported are {SUPPORTED}"
        ) from error
    for function, parameters in _PARAMETERS.items():
        _check_parameters(loss, function, parameters)
    dispatch = getattr(loss, "loss_function", None)
    if dispatch is None or "value_loss_function" not in dispatch.__code__.co_names:
        raise UnsupportedFrameworkError(
            f"{LOSS}.loss_function does not call value_loss_function by that name; supported are "
            f"{SUPPORTED}"
        )
    compute: CodeType = original(loss.compute_advantages_and_returns).__code__
    if "custom_advantage_function_path" not in compute.co_names:
        raise UnsupportedFrameworkError(
            f"this slime has no --custom-advantage-function-path; supported are {SUPPORTED}"
        )
    names_of_keywords: list[Any] = [
        constant for constant in compute.co_consts if isinstance(constant, tuple)
    ]
    whitens_all_ranks = any("with_context_parallel" in names for names in names_of_keywords)
    return Slime(loss, sys.modules.get(ACTOR), sys.modules.get(MODEL), whitens_all_ranks)


def _check_parameters(loss: ModuleType, name: str, expected: tuple[str, ...]) -> None:
    function = original(getattr(loss, name, None))
    if not callable(function):
        raise UnsupportedFrameworkError(f"{LOSS}.{name} is missing; supported are {SUPPORTED}")
    found = tuple(inspect.signature(function).parameters)
    if found[: len(expected)] != expected:
        raise UnsupportedFrameworkError(
            f"{LOSS}.{name} is called with {found}, expected parameters {expected}; supported are "
            f"{SUPPORTED}"
        )


def original(function: Any) -> Any:
    """Return slime's function that the patch replaced, or the function itself."""
    return getattr(function, "__advantage_original__", function)


def replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a module's function by `make(function)`, once; raises UnsupportedFrameworkError if it
    has none of this name."""
    old = getattr(module, name, None)
    if not callable(old):
        raise UnsupportedFrameworkError(
            f"{module.__name__} has no {name}, which the patch has to wrap; supported are "
            f"{SUPPORTED}"
        )
    if original(old) is old:
        new = make(old)
        new.__advantage_original__ = old
        setattr(module, name, new)


def wrap(module: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a module's function by `around`, which is called with the old function and its
    arguments; once."""

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def wrapped(*args: Any, **named: Any) -> Any:
            return around(old, *args, **named)

        return wrapped

    replace(module, name, make)
