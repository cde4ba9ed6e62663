"""Runs at the start of every process of a run: patches torch, Megatron and slime as they are
imported.

slime spreads over many processes (driver, Ray actors, spawned servers); this folder at the head of
PYTHONPATH reaches all of them. Nothing is imported here before it is asked for.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

ON_EVERY_DEVICE = {"slime.backends.megatron_utils.actor": "cpu.recorder:record_training"}
ON_CPU = {
    "torch": "cpu.cuda_on_cpu:patch_torch",
    "slime.utils.accelerator": "cpu.cuda_on_cpu:choose_cpu",
    "slime.backends.megatron_utils.arguments": "cpu.megatron_on_cpu:choose_precision",
    "megatron.core.optimizer.distrib_optimizer": "cpu.megatron_on_cpu:patch_optimizer",
}
ON_GPU = {
    "slime.backends.megatron_utils.initialize": "gpu.missing_libraries:accept_numpy_2",
    "megatron.core.optimizer.distrib_optimizer": "gpu.missing_libraries:patch_optimizer",
    "sglang.srt.layers.utils.multi_platform": "gpu.missing_libraries:use_native_operators",
}
"""Module name -> what to call with the module once it is loaded; the files lie in tests/slime."""


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
        getattr(importlib.import_module(f"tests.slime.{file}"), name)(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, hooks: dict[str, str]) -> None:
        self.left = dict(hooks)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.left:
            return None
        hook = self.left.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, hook)
        return spec


if os.environ.get("SLIME_CPU_WORK"):
    on_gpu = os.environ.get("SLIME_TEST_ON_GPU") == "1"
    sys.meta_path.insert(0, _Finder({**ON_EVERY_DEVICE, **(ON_GPU if on_gpu else ON_CPU)}))
    if on_gpu:
        # The packages beside this file stand in for GPU libraries, which a GPU run needs for real.
        sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
