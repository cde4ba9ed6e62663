"""slime's `--custom-megatron-init-path`: dual-discount GAE and the first-token value weight, in both roles.

slime calls it once in every process of the actor and of the critic. `--megatron-config-path`, which gives the critic
its own learning rate, silently drops `--custom-advantage-function-path` for the critic; so where that flag exists it
is set again here, from inside, and everything else (KL, whitening, distillation) stays slime's. Where it does not
exist, or where whitening leaves context parallelism out, `compute_advantages_and_returns` is replaced, also in the
training process's own module, which binds it by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from advantage.errors import FlagError, UnsupportedFrameworkError
from advantage.megatron.ppo import make_compute_advantages
from advantage.megatron.versions import Framework, find_framework, original
from advantage.settings import advantage_settings
from advantage.turn_table import CONVERTER
from advantage.value_weight import weigh_first_tokens

logger = logging.getLogger(__name__)

HOOK = "advantage.hook.compute_advantages"
INSTALL = "advantage.patch.install"

_ABSENT = object()
_undo: list[Callable[[], None]] = []


def install(args: Any) -> None:
    """Make this process compute dual-discount advantages and weigh first tokens; safe to call again.

    Raises:
        FlagError: the flags would lead to wrong advantages; names the flag to change.
        UnsupportedFrameworkError: the framework is not one that the patch knows, or did not take it.
    """
    framework = find_framework()
    check_flags(args)
    _replace(framework.loss, "value_loss_function", weigh_first_tokens)
    replaces = not framework.has_flag or (_whitens_slices(args) and not framework.whitens_all_ranks)
    if replaces:
        ours = make_compute_advantages(framework.loss)
        for module in (framework.loss, framework.actor):
            if module is not None:
                _replace(module, "compute_advantages_and_returns", lambda _: ours)
    if framework.has_flag:
        _set(args, "custom_advantage_function_path", HOOK)
    verify_installed(args, framework)
    settings = advantage_settings(args)
    logger.info(
        "dual-discount GAE is installed in %s through %s: %s, first-token value weight %g",
        framework.name,
        "compute_advantages_and_returns" if replaces else "--custom-advantage-function-path",
        settings.discounts,
        settings.value_first_token_weight,
    )


def uninstall() -> None:
    """Put everything back as it was before the first `install`."""
    while _undo:
        _undo.pop()()


def verify_installed(args: Any, framework: Framework) -> None:
    """Make sure that what this process will call is ours.

    Raises:
        UnsupportedFrameworkError: it is not; says what was found.
    """
    if original(framework.loss.value_loss_function) is framework.loss.value_loss_function:
        raise UnsupportedFrameworkError(f"{framework.loss.__name__}.value_loss_function is not the weighted one")
    bound = [module.compute_advantages_and_returns for module in (framework.loss, framework.actor) if module]
    if any(function is not bound[0] for function in bound):
        raise UnsupportedFrameworkError(
            f"{framework.actor.__name__} uses another compute_advantages_and_returns than {framework.loss.__name__}; "
            "something else replaced one of them"
        )
    replaced = original(bound[0]) is not bound[0]
    flagged = framework.has_flag and args.custom_advantage_function_path == HOOK
    if not replaced and not flagged:
        raise UnsupportedFrameworkError(f"{framework.name} in this process would not call {HOOK}")


def check_flags(args: Any) -> None:
    """Refuse what would silently train on other advantages than the configured ones.

    Raises:
        FlagError: names the flag to change.
    """
    if args.advantage_estimator != "ppo":
        raise FlagError(
            f"--advantage-estimator is {args.advantage_estimator}, but dual-discount GAE needs a critic: give "
            f"--advantage-estimator ppo, or leave {INSTALL} out"
        )
    if not getattr(args, "compute_advantages_and_returns", True):
        raise FlagError(f"--disable-compute-advantages-and-returns leaves nothing for {INSTALL} to do; drop one")
    if not getattr(args, "custom_convert_samples_to_train_data_path", None):
        raise FlagError(f"no converter writes the turn table that the advantages are computed from; give {CONVERTER}")
    foreign = getattr(args, "custom_advantage_function_path", None)
    if foreign not in (None, HOOK):
        raise FlagError(f"--custom-advantage-function-path is {foreign}; {INSTALL} would replace it, drop one of them")
    advantage_settings(args)
    _check_roles(args)


def _check_roles(args: Any) -> None:
    """Neither role may be configured out of the patch by `--megatron-config-path`."""
    path = getattr(args, "megatron_config_path", None)
    if not path or not Path(path).is_file():
        return
    entries = (yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}).get("megatron") or []
    for entry in entries:
        overrides = entry.get("overrides") or entry.get("args") or {}
        for key in ("custom_megatron_init_path", "custom_convert_samples_to_train_data_path", "advantage_estimator"):
            if key in overrides and overrides[key] != getattr(args, key, None):
                raise FlagError(
                    f"{path} overrides {key} for role {entry.get('role')}, so actor and critic would disagree about "
                    "advantages; give it once, on the command line"
                )


def _whitens_slices(args: Any) -> bool:
    return bool(getattr(args, "normalize_advantages", False)) and getattr(args, "context_parallel_size", 1) > 1


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in place of a module's function, once."""
    old = getattr(module, name)
    if original(old) is not old:
        return
    new = make(old)
    new.__advantage_original__ = old
    setattr(module, name, new)
    _undo.append(lambda: setattr(module, name, old))


def _set(args: Any, name: str, value: Any) -> None:
    old = getattr(args, name, _ABSENT)
    if old is not _ABSENT and old == value:
        return
    setattr(args, name, value)
    _undo.append(lambda: delattr(args, name) if old is _ABSENT else setattr(args, name, old))
