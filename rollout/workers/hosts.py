"""Where environments run: a thread, a worker process or a Ray actor, each behind the interface
`Host`."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from envs.loading import thread_loop
from rollout.errors import MissingDependencyError
from rollout.workers.child import Child, ChildLostError, end_guarded, start_guarded


class Host(Protocol):
    """One worker, which is killed once it has raised `ChildLostError`."""

    killed: bool

    async def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of `EnvHost`; raises WorkerFault if it fails, or ChildLostError."""
        ...

    def kill(self) -> None: ...


class InlineHost:
    """A thread of this process; like the main thread, it has an event loop.

    A hung step cannot be killed, so its thread is abandoned.
    """

    def __init__(self) -> None:
        # Imported here, because it is environment code, which otherwise runs elsewhere.
        from rollout.workers.worker import EnvHost

        self.killed = False
        self._host = EnvHost()
        set_loop = lambda: asyncio.set_event_loop(thread_loop())
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="env", initializer=set_loop
        )

    async def call(self, method: str, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return _result(
            *await loop.run_in_executor(self._thread, self._host.handle, method, *arguments)
        )

    def kill(self) -> None:
        if not self.killed:
            self._thread.submit(lambda: thread_loop().close())
        self.killed = True
        self._thread.shutdown(wait=False)


class ProcessHost(Child):
    """A worker process on a private socket; it ends when this process does, for whatever reason."""

    def __init__(self, entry: str = "rollout.workers.worker:main") -> None:
        """`entry` is the function that serves the socket."""
        self.killed = False
        self.process, self._socket = start_guarded(entry)
        super().__init__(f"worker process {self.process.pid}")

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.transport is None and not self.lost:
            await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)
        return await super().call(method, *arguments)

    def kill(self) -> None:
        self.killed = True
        if self.transport is None:
            self._socket.close()
        self.abort()
        end_guarded(self.process)


class RayHost:
    """A Ray actor on any node of the cluster."""

    def __init__(self) -> None:
        from rollout.workers.worker import EnvHost

        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError(
                "env_backend: ray needs Ray: pip install ray, or use process"
            ) from error
        self.killed = False
        self._ray: Any = ray  # Ray's annotations do not cover actors made from a class
        # Ray spreads only actors that request a resource, hence the hundredth of a CPU.
        options = {"num_cpus": 0.01, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._actor = self._ray.remote(**options)(EnvHost).remote()

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            answer = await self._actor.handle.remote(method, *arguments)
        except self._ray.exceptions.RayError as error:
            raise ChildLostError(f"Ray actor died ({type(error).__name__})") from error
        return _result(*answer)

    def kill(self) -> None:
        self.killed = True
        self._ray.kill(self._actor)


def _result(ok: bool, value: Any) -> Any:
    if ok:
        return value
    raise value


BACKENDS: dict[str, Callable[[], Host]] = {
    "inline": InlineHost,
    "process": ProcessHost,
    "ray": RayHost,
}
