"""Runs in the sandbox: passes connections to a local port on to a Unix socket, and runs the agent's
program.

    python -I -S forward.py SOCKET PORT COMMAND...

The sandbox has no network but its own loopback; the socket leads to the model's server.
"""

import asyncio
import contextlib
import os
import sys

NOT_FOUND = 127
"""Exit code of a program that cannot be started, as in shells."""


async def main(path: str, port: str, *command: str) -> int:
    """Returns the program's exit code."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, to_there = await asyncio.open_unix_connection(path)
            # When either side closes, so does the other: the server must notice a client that gives
            # up.
            both = [
                asyncio.create_task(_pass(reader, to_there)),
                asyncio.create_task(_pass(there, writer)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            to_there.close()
        writer.close()

    await asyncio.start_server(connect, "127.0.0.1", int(port))
    try:
        # A separate session: a signal to its process group must not reach this process.
        program = await asyncio.create_subprocess_exec(*command, start_new_session=True)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", flush=True)
        return NOT_FOUND
    return await program.wait()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


if __name__ == "__main__":
    ended = asyncio.run(main(*sys.argv[1:]))
    os._exit(128 - ended if ended < 0 else ended)
