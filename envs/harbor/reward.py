"""The reward files of a verdict: watches from outside who opens them, and reads the number that
they hold.

`reward.txt` and `reward.json` are mounts in the sandbox, so nothing there can replace, move or link
them. Each is created empty, and the kernel reports every time that one is opened for writing,
closed, or changed in its mode. A reward counts only if it was written in one go, and no other
writer was kept out meanwhile: a process that a tested program left behind would be a second writer.
One change of the mode is allowed, as `shutil.copy` makes it.
"""

import ctypes
import json
import math
import os
import select
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from envs.errors import EnvironmentFault
from envs.swe.sandbox.workspace import read_plain

FILES = ("reward.txt", "reward.json")
_MAX_BYTES = 64 << 10
_ATTRIB = 0x4
_CLOSE_WRITE = 0x8
_CLOSE_NOWRITE = 0x10
_OPEN = 0x20
_OVERFLOW = 0x4000
_WATCHED = _ATTRIB | _CLOSE_WRITE | _CLOSE_NOWRITE | _OPEN
_EVENT = struct.Struct("iIII")


@dataclass
class RewardWatch:
    """Watches the reward files in `folder`. Use as a context manager around the run of the
    tests."""

    folder: Path
    counts: dict[str, Counter[int]] = field(default_factory=dict)

    def __enter__(self) -> "RewardWatch":
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_CLOEXEC)
        self._names: dict[int, str] = {}
        # The kernel merges an event with an equal one right before it. With a watch on the folder
        # too, each opening makes two different events, so those of two openings alternate.
        for name in ("", *FILES):
            number = libc.inotify_add_watch(self._fd, os.fsencode(self.folder / name), _WATCHED)
            if self._fd < 0 or number < 0:
                raise EnvironmentFault(
                    f"the reward files cannot be watched: {os.strerror(ctypes.get_errno())}"
                )
            self._names[number] = name
        self.counts = {name: Counter() for name in ("", *FILES)}
        self._end, self._stop = os.pipe()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stop)
        self._reader.join()
        os.close(self._fd)
        os.close(self._end)

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._fd, self._end], [], [])
            if self._fd not in ready:
                return
            data = os.read(self._fd, 1 << 16)
            while data:
                watch, mask, _, length = _EVENT.unpack_from(data)
                data = data[_EVENT.size + length :]
                for name in [self._names[watch]] if watch in self._names else self.counts:
                    self.counts[name][mask] += 1

    def writers(self, name: str) -> int:
        """How many times a file was opened for writing; raises ValueError if that cannot be
        told."""
        counts = self.counts[name]
        if counts[_OVERFLOW] or counts[_OPEN] != counts[_CLOSE_WRITE] + counts[_CLOSE_NOWRITE]:
            raise ValueError(f"{name} was opened by several processes at once")
        writable = (self.folder / name).stat().st_mode & 0o200
        if counts[_ATTRIB] > 1 or not writable:
            raise ValueError(f"the mode or times of {name} were changed")
        return counts[_CLOSE_WRITE]


def make_files(folder: Path) -> None:
    """Make the empty reward files."""
    folder.mkdir()
    for name in FILES:
        (folder / name).touch()
        (folder / name).chmod(0o666)


def read_reward(folder: Path, key: str, watch: RewardWatch | None) -> float | None:
    """Read the reward in `reward.json` or `reward.txt`; if both have one, the lower. None if
    neither was written.

    Of several numbers in `reward.json`, the reward is the one at `key`. Without such a key, it is
    the only number, or else the one in `reward.txt`. So a program under test gains nothing by
    writing the file that the tests do not write.

    Raises ValueError if there is no number, or several and no `key`, and if `watch` saw more than
    one writer of a file.
    """
    text, content = (_read_written(folder / name, watch) for name in FILES)
    found = [] if text is None else [float(text.strip())]
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{found[0]} is not a finite number")
    if content is not None:
        numbers = _numbers(content)
        if key in numbers or len(numbers) == 1:
            found.append(numbers[key] if key in numbers else next(iter(numbers.values())))
        if not found:
            names = ", ".join(list(numbers)[:8]) or "none"
            raise ValueError(
                f"reward.json has no number {key!r} (its numbers: {names}); set env.reward_key"
            )
    return min(found, default=None)


def _numbers(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("reward.json is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("reward.json holds no object")
    numbers: dict[str, float] = {}
    for key, value in found.items():
        if type(value) in (int, float) and abs(value) < 1e300:
            numbers[key] = float(value)
    return numbers


def _read_written(file: Path, watch: RewardWatch | None) -> str | None:
    """Read a reward file; None if nothing was written."""
    writers = watch.writers(file.name) if watch is not None else 0
    if writers > 1:
        raise ValueError(f"{file.name} was opened for writing {writers} times")
    try:
        data = read_plain(file, _MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    if data is None:
        raise ValueError(f"{file.name} is not a plain file")
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{file.name} is longer than {_MAX_BYTES >> 10} KiB")
    return data.decode("utf-8") if data else None
