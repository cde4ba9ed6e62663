"""The few names of SGLang that slime imports when its engines run elsewhere; one file, all
submodules."""

import argparse
import dataclasses
import sys
from types import ModuleType
from typing import Any


@dataclasses.dataclass
class ServerArgs:
    """The fields that slime reads of an engine that it did not start."""

    model_path: str = ""
    trust_remote_code: bool = False
    host: str = "127.0.0.1"
    port: int = 30000
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    moe_dp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    random_seed: int = 0
    enable_memory_saver: bool = False

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for name in ("tp", "dp", "pp", "ep", "moe-dp"):
            parser.add_argument(f"--{name}-size", type=int, default=1)
        # The same, under SGLang's longer names, which slime reads, too.
        for name in ("data", "pipeline", "expert"):
            parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
        for name in (
            "enable-dp-attention",
            "enable-deterministic-inference",
            "enable-metrics",
            "disable-radix-cache",
        ):
            parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument("--speculative-algorithm", default=None)
        parser.add_argument("--context-length", type=int, default=None)
        parser.add_argument("--mem-fraction-static", type=float, default=None)
        parser.add_argument("--cuda-graph-max-bs", type=int, default=None)


class _Unused:
    """Something that only a run with engines of its own would call."""

    @staticmethod
    def serialize(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("engines of a CPU run are updated from disk")


def _submodule(name: str, **members: Any) -> None:
    module = ModuleType(f"sglang.{name}")
    module.__path__ = []  # type: ignore[attr-defined]
    vars(module).update(members)
    sys.modules[f"sglang.{name}"] = module


_submodule("srt")
_submodule(
    "srt.constants",
    GPU_MEMORY_TYPE_KV_CACHE="kv_cache",
    GPU_MEMORY_TYPE_WEIGHTS="weights",
    GPU_MEMORY_TYPE_CUDA_GRAPH="cuda_graph",
)
_submodule("srt.server_args", ServerArgs=ServerArgs)
_submodule("srt.utils", kill_process_tree=lambda *_, **__: None, MultiprocessingSerializer=_Unused)
_submodule("srt.utils.patch_torch", monkey_patch_torch_reductions=lambda: None)
_submodule("srt.weight_sync")
_submodule("srt.weight_sync.tensor_bucket", FlattenedTensorBucket=_Unused)
