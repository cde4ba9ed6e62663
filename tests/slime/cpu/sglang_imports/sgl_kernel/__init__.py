"""Stand-in for SGLang's compiled kernels: importable, and of no use on a CPU without AMX."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_gdn_gating_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
)
"""Looked up while SGLang's models are imported; never called."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name == "sgl_kernel.mamba" else None

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = __getattr__  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Submodules())
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in OPERATORS:
    _library.define(f"{_name}(Tensor x, Tensor y) -> Tensor")
