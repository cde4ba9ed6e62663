"""Starts a real SGLang server on a CPU without AMX: run_sglang.py SERVER FLAGS... (see
`install_sglang.sh`)."""

import importlib.util
import os
import platform
import sys
from pathlib import Path

import torch

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
IMPORTS = str(Path(__file__).with_name("sglang_imports"))


def prepare() -> None:
    """Stand-ins for what has no CPU build: sgl_kernel, torchvision's operators and Triton."""
    sys.path.insert(0, IMPORTS)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (IMPORTS, os.environ.get("PYTHONPATH")))
    )
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    if importlib.util.find_spec("triton") is None:
        _stub_triton()


def _stub_triton() -> None:
    """SGLang has a stub for Apple machines, which have no Triton either; ask for it in their
    name."""
    site = Path(next(iter(importlib.util.find_spec("torch").submodule_search_locations))).parent
    spec = importlib.util.spec_from_file_location(
        "_platform_stubs", site / "sglang" / "_platform_stubs.py"
    )
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    stubs._patch_non_blocking = lambda: None
    real = sys.platform, platform.machine, torch.backends.mps.is_available
    try:
        sys.platform, platform.machine, torch.backends.mps.is_available = (
            "darwin",
            lambda: "arm64",
            lambda: True,
        )
        stubs.install_platform_stubs()
    finally:
        sys.platform, platform.machine, torch.backends.mps.is_available = real


prepare()  # at import, because SGLang's own child processes import this file again

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
