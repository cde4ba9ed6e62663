"""Runs at the start of every process of a CPU run: patches torch, Megatron and slime as they are imported.

slime spreads over many processes (driver, Ray actors, spawned servers); this folder at the head of PYTHONPATH
reaches all of them. Nothing is imported here before it is asked for.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

AFTER_IMPORT = {
    "torch": "cuda_on_cpu:patch_torch",
    "slime.utils.accelerator": "cuda_on_cpu:choose_cpu",
    "slime.backends.megatron_utils.arguments": "megatron_on_cpu:choose_precision",
    "megatron.core.optimizer.distrib_optimizer": "megatron_on_cpu:patch_optimizer",
    "slime.backends.megatron_utils.actor": "recorder:record_training",
    "miles.backends.megatron_utils.actor": "recorder:record_training",
}
"""Module name -> what to call with the module once it is loaded; the files lie one folder up."""


class _Loader(importlib.abc.Loader):
    """A module's own loader, and what is to happen after it."""

    def __init__(self, loader: Any, target: str) -> None:
        self.loader = loader
        self.target = target

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        file, name = self.target.split(":")
        getattr(importlib.import_module(f"tests.slime.cpu.{file}"), name)(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.left = dict(AFTER_IMPORT)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.left:
            return None
        hook = self.left.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, hook)
        return spec


if os.environ.get("SLIME_CPU_WORK"):
    sys.meta_path.insert(0, _Finder())
