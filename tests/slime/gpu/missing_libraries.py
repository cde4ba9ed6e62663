"""Replacements for libraries that a GPU machine may lack. slime's image has them all, so nothing is
replaced there."""

import importlib.util
import os
from types import ModuleType

from tests.slime.cpu.megatron_on_cpu import patch_optimizer as patch_torch_optimizer


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def has_flashinfer() -> bool:
    """False if flashinfer is missing, or if SGLang's own variable turns it off."""
    switched_on = os.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE", "true").lower() in ("true", "1")
    return switched_on and is_installed("flashinfer")


def megatron_flags() -> list[str]:
    """Without TransformerEngine: Megatron's local layers. Without Apex: none of the fusions that
    need it."""
    # Too much for the processes that only call a hook.
    from tests.slime.cpu.harness import LOCAL_FLAGS, NO_DROPOUT

    if not is_installed("transformer_engine"):
        return [*LOCAL_FLAGS, NO_DROPOUT]
    if is_installed("apex"):
        return [NO_DROPOUT]
    return ["--no-gradient-accumulation-fusion --no-persist-layer-norm", NO_DROPOUT]


def sglang_flags() -> list[str]:
    """Without flashinfer: Triton's attention, torch's sampling, and no CUDA graphs of the replaced
    operators."""
    if has_flashinfer():
        return []
    return [
        "--sglang-attention-backend triton --sglang-sampling-backend pytorch",
        "--sglang-disable-cuda-graph --sglang-cuda-graph-backend-prefill disabled",
    ]


def accept_numpy_2(initialize: ModuleType) -> None:
    """slime refuses NumPy 2 because older Megatron releases do; Megatron-Core 0.16 runs with it."""
    import numpy

    if int(numpy.__version__.partition(".")[0]) >= 2:
        numpy_1 = ModuleType("numpy")
        vars(numpy_1).update(vars(numpy), __version__="1.26.4")
        initialize.np = numpy_1  # type: ignore[attr-defined]


def patch_optimizer(module: ModuleType) -> None:
    """Without TransformerEngine and Apex, Megatron uses torch's AdamW, which it cannot save and
    load by itself."""
    if not is_installed("transformer_engine") and not is_installed("apex"):
        patch_torch_optimizer(module)


def use_native_operators(module: ModuleType) -> None:
    """Without flashinfer, run SGLang's norms and activations in torch: their CUDA versions call
    it."""
    if not has_flashinfer():
        module.MultiPlatformOp.dispatch_forward = lambda self: self.forward_native
