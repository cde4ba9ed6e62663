"""Stand-in for torch_memory_saver: there is no GPU memory to save.

slime preloads a library from the folder above the package; `__file__` points to where the run has
put an empty one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__file__ = os.path.join(
    os.environ["SLIME_CPU_WORK"], "preload", "torch_memory_saver", "__init__.py"
)


class _Saver:
    _impl: Any = None
    memory_margin_bytes = 0

    def pause(self, *_: Any, **__: Any) -> None:
        pass

    def resume(self, *_: Any, **__: Any) -> None:
        pass

    def get_cpu_backup(self, *_: Any, **__: Any) -> None:
        return None

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    @contextmanager
    def region(self, *_: Any, **__: Any) -> Iterator[None]:
        yield


torch_memory_saver = _Saver()
