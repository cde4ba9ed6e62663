"""What `slime-verlog view` does: builds the page once, or keeps rewriting it."""

import os
import time
import webbrowser
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from embedded.run.folder import check_out, write_text
from inspection.records import FILE, names_of
from inspection.target import check_numbers
from inspection.view.page import Packer, build_page
from inspection.view.replay import Worlds
from inspection.view.sources import episode_sources, files_of, read_run
from inspection.view.training import expand_runs, read_training
from slime_verlog import ConfigError

PAIR = 2  # two runs are compared episode by episode; of more, a page compares the training

_LOOK_S = 5.0  # between two looks at a followed run
_IDLE_PER_BUSY = 3  # a followed page costs at most a quarter of a CPU, however large it is
_State = dict[Path, tuple[int, int]]


class Book:
    """The episodes of one page; `update` adds those that were written since the last call."""

    def __init__(self, options: Namespace) -> None:
        self._options, self._runs = options, expand_runs(options.runs)
        self._counts: Counter[tuple[int, Path]] = Counter()
        if options.worlds and not find_spec("PIL"):
            options.worlds = 0
            print("note: worlds are not drawn, because Pillow is missing: pip install pillow")
        self._packer, self._worlds = Packer(), Worlds(options.worlds, options.trust)

    def update(self) -> int:
        """Read the runs and add their new episodes; return how many there are."""
        before = self._counts.total()
        self._runs = expand_runs(self._options.runs)
        for number, run in enumerate(self._runs):
            self._worlds.most = self._options.worlds * (number + 1) // len(self._runs)  # each run has its share
            for source in episode_sources(run, with_training=len(self._runs) == 1):
                self._add(source, number)
        return self._counts.total() - before

    def _add(self, source: Path, number: int) -> None:
        known = self._counts[number, source]
        name = names_of(self._runs)[number] if len(self._runs) > PAIR else None
        episodes = read_run(source, self._options.tokenizer, self._options.trust, skip=known or None)
        for episode in tqdm(episodes, desc=str(source), unit=" episodes", leave=False, disable=None):
            self._packer.add(episode, 0 if name else number, self._worlds.draw(episode), name)
            self._counts[number, source] += 1

    def write(self, path: Path, follow: float = 0.0) -> None:
        """Write the page; `follow` is the number of seconds after which it reloads itself."""
        several = len(self._runs) > PAIR
        studies = map(read_training, self._runs, names_of(self._runs))
        head = {
            "runs": [", ".join(map(str, self._options.runs))] if several else [str(run) for run in self._runs],
            "studies": [{**study, "run": number} for number, study in enumerate(studies) if study],
            "written": datetime.now().astimezone().isoformat(timespec="seconds"),
            "follow": follow,
            "episodes": self._packer.rows,
        }
        resolved = [run.resolve() for run in self._options.runs]
        names = [run.parent.name if run.name == FILE else run.name for run in resolved]
        text = build_page(" and ".join(names), head, self._packer.blocks())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file with --out") from error

    def summary(self, path: Path) -> str:
        """Return the sentence for the terminal."""
        worlds = self._worlds
        said = f"{path} ({path.stat().st_size / 1e6:.1f} MB): {self._counts.total()} episodes"
        if worlds.drawn:
            said += f", {worlds.drawn} with their world"
        if worlds.differing:
            said += f"; {worlds.differing} could not be drawn, the page says why"
        if worlds.untrusted:
            names = ", ".join(sorted(worlds.untrusted))
            said += f"; worlds of {names} are drawn with --trust, which runs the code that the records name"
        return said


def write_once(options: Namespace) -> int:
    """Write the page and print its path."""
    book, path = Book(_checked(options)), page_path(options)
    book.update()
    book.write(path)
    print(book.summary(path))
    _open(options, path)
    return 0


def follow(options: Namespace) -> int:
    """Rewrite the page whenever the runs' files change, until Ctrl-C; then write it once more without reloading.

    Also ends when the process that started it has ended, and with ConfigError if a file that no longer changes cannot
    be read.
    """
    book, path, opened = Book(_checked(options)), page_path(options), False
    before: _State = {}
    half_written: _State = {}
    waits = "" if _state(options.runs) else " (no episodes yet)"
    print(f"following {', '.join(map(str, options.runs))}{waits}; Ctrl-C ends", flush=True)
    try:
        parent = os.getppid()
        while os.getppid() == parent:
            began, state = time.monotonic(), _state(options.runs)
            if state and state != before:
                try:
                    fresh = book if _only_grew(before, state, options) else Book(options)
                    fresh.update()
                except ConfigError:
                    if state == half_written:
                        raise
                    half_written = state
                else:
                    book, before = fresh, state
                    book.write(path, _LOOK_S)
                    print(book.summary(path), flush=True)
                    opened = opened or _open(options, path)
            time.sleep(max(_LOOK_S, _IDLE_PER_BUSY * (time.monotonic() - began)))
    except KeyboardInterrupt:
        pass
    if before:
        with suppress(ConfigError):
            book.update()
        book.write(path)
    print(f"\nthe page no longer reloads: {path}" if before else "\nno episodes were written")
    return 0


def _state(runs: Sequence[Path]) -> _State:
    """Size and modification time of every file; empty until each run has one."""
    try:
        found = [path for run in expand_runs(runs) for path in files_of(run)]
    except ConfigError:
        return {}
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def _only_grew(before: _State, state: _State, options: Namespace) -> bool:
    """Whether each run still has one file of episodes, which only grew, so that its episodes keep their numbers."""
    runs = expand_runs(options.runs)
    if len(runs) != len(options.runs) or any(file.suffix == ".pt" for file in before):
        return False
    if any(len(files_of(run, metrics=False)) != 1 for run in runs):
        return False
    for file, (size, _) in before.items():
        now, _ = state.get(file, (0, 0))
        if now < size and file.suffix != ".json":
            return False
    return bool(before)


def page_path(options: Namespace) -> Path:
    """Return the page's path."""
    if options.out is not None:
        return options.out
    run = options.runs[0]
    is_file = run.is_file() or run.suffix in (".jsonl", ".pt")  # it may not exist yet
    folder = run.parent if is_file and not run.is_dir() else run
    match len(options.runs):
        case 1:
            return folder / "episodes.html"
        case 2:
            return folder / "compare.html"
    return run.parent / "runs.html"


def _checked(options: Namespace) -> Namespace:
    """The options; raises ConfigError for a number out of range, or an output that would replace something else."""
    check_numbers(options, {"worlds": 0})
    path: Path | None = options.out
    if path is not None and path.suffix != ".html" and path.exists():
        raise ConfigError(f"--out {path} exists, and does not end in .html; give another file")
    check_out(page_path(options).parent)
    return options


def _open(options: Namespace, path: Path) -> bool:
    return options.open and webbrowser.open(path.resolve().as_uri())
