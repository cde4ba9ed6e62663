"""What slime and Megatron ask of torch.cuda, answered by the CPU: every device is the CPU, every
stream is now.

For tests of the loop, not of speed or memory. Called by `imports/sitecustomize.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

_vision: Any = None
"""Keeps the declared operators alive."""

MEMORY = 16 << 30
"""Bytes that the pretended device has."""

FACTORIES = """
tensor as_tensor zeros ones empty full arange linspace rand randn empty_strided
zeros_like ones_like empty_like full_like rand_like randn_like randint
"""


class Stream:
    """A stream or event on which everything has already happened."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def _done(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = record_event = synchronize = _done


def patch_torch(torch: ModuleType) -> None:
    """Replace torch.cuda's functions, and send every tensor that is meant for "cuda" to the CPU."""
    cuda = torch.cuda
    _devices(cuda, torch.device("cpu"))
    _memory(cuda)
    _random(torch)
    for kind in ("Byte", "Int", "Long", "Half", "Float", "Double", "BFloat16"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    for name in FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _tensors(torch)
    _process_groups(torch.distributed)
    _declare_vision_operators(torch)
    _ignore(torch._C, "_host_emptyCache")


def _ignore(module: Any, *names: str) -> None:
    """Make functions do nothing; each gets one of its own, because torch._dynamo tells functions by
    identity."""
    for name in names:
        setattr(module, name, lambda *_, **__: None)


def _devices(cuda: ModuleType, cpu: Any) -> None:
    properties = SimpleNamespace(
        total_memory=MEMORY, major=8, minor=0, multi_processor_count=1, name="cpu", uuid="cpu"
    )
    cuda.current_device = lambda: cpu
    cuda.device_count = lambda: 1
    _ignore(cuda, "set_device", "synchronize", "_lazy_init")
    cuda.is_initialized = lambda: True
    cuda._lazy_call = lambda function, **_: function()
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_name = lambda *_: "cpu"
    cuda.get_device_properties = lambda *_: properties
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = Stream
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *_, **__: Stream())
    for name in ("stream", "device"):
        setattr(cuda, name, lambda *_, **__: contextlib.nullcontext())


def _memory(cuda: ModuleType) -> None:
    _ignore(cuda, "empty_cache", "ipc_collect", "reset_peak_memory_stats")
    cuda.mem_get_info = lambda *_: (MEMORY // 2, MEMORY)
    cuda.memory_stats = lambda *_: {}
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *_: 0)


def _random(torch: ModuleType) -> None:
    import torch.cuda.random as cuda_random

    class Generators:
        def __getitem__(self, _: Any) -> Any:
            return torch.default_generator

    for module in (torch.cuda, cuda_random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        for name in ("manual_seed", "manual_seed_all"):
            setattr(
                module, name, lambda value: torch.default_generator.manual_seed(int(value)) and None
            )
        _ignore(module, "_lazy_init")
        module._lazy_call = lambda function, **_: function()
    torch.cuda.default_generators = Generators()


def _declare_vision_operators(torch: ModuleType) -> None:
    """torchvision's operators are built for GPUs and do not load here, but its Python code looks
    two of them up."""
    global _vision
    _vision = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _vision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _process_groups(distributed: ModuleType) -> None:
    """slime's releases name NCCL and a GPU themselves, where they convert checkpoints."""
    real = distributed.init_process_group

    def init_process_group(
        backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> None:
        real("gloo" if backend == "nccl" else backend, *args, **kwargs)

    distributed.init_process_group = init_process_group


def _elsewhere(device: Any) -> Any:
    """The device to use where "cuda" in any spelling was asked for."""
    import torch

    kind = device.type if isinstance(device, torch.device) else str(device).split(":")[0]
    meant_for_gpu = kind == "cuda" or (isinstance(device, int) and not isinstance(device, bool))
    return torch.device("cpu") if meant_for_gpu else device


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _elsewhere(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_cpu


def _tensors(torch: ModuleType) -> None:
    real_to, real_type = torch.Tensor.to, torch.Tensor.type

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _elsewhere(kwargs["device"])
        args = (
            tuple(_elsewhere(a) if isinstance(a, str | int | torch.device) else a for a in args[:1])
            + args[1:]
        )
        return real_to(self, *args, **kwargs)

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = real_type(self, *args, **kwargs)
        # Megatron tells a tensor's kind by this text, and knows only the GPU's.
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    def unchanged(self: Any, *_: Any, **__: Any) -> Any:
        return self

    torch.Tensor.to, torch.Tensor.type = to, type_
    torch.Tensor.cuda = torch.Tensor.pin_memory = torch.nn.Module.cuda = unchanged


def choose_cpu(accelerator: ModuleType) -> None:
    """Make slime's accelerator interface (newer versions have one) choose the CPU."""
    import torch
    from slime.utils.accelerator.base import Accelerator

    class Cpu(Accelerator):
        name = device_type = "cpu"
        communication_backend_name = "gloo"

        def is_available(self) -> bool:
            return True

        def device(self, index: Any = None) -> Any:
            return torch.device("cpu")

        def device_name(self, index: Any = None) -> str:
            return "cpu"

        def set_device(self, index: Any) -> None:
            pass

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def synchronize(self, device: Any = None) -> None:
            pass

        def current_stream(self, device: Any = None) -> Stream:
            return Stream()

        def empty_cache(self) -> None:
            pass

        def mem_get_info(self, device: Any = None) -> tuple[int, int]:
            return MEMORY // 2, MEMORY

        def memory_allocated(self, device: Any = None) -> int:
            return 0

        def memory_reserved(self, device: Any = None) -> int:
            return 0

        def distributed_device_id(self, index: Any = None) -> None:
            return None

    accelerator.set_accelerator(Cpu())
