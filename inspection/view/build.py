"""What `slime-verlog view` does: builds the page once, or keeps rewriting it."""

import os
import time
import webbrowser
from argparse import Namespace
from collections.abc import Sequence
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
    """The episodes of one page, as its runs have them now."""

    def __init__(self, options: Namespace) -> None:
        """Read the runs; raises ConfigError if one cannot be read."""
        self._options = options
        self._runs = expand_runs(options.runs)
        self._packer = Packer()
        self._worlds = Worlds(options.worlds, options.trust)
        self._names = names_of(self._runs)
        for number, run in enumerate(self._runs):
            # Each run has its share.
            self._worlds.most = options.worlds * (number + 1) // len(self._runs)
            for source in episode_sources(run, with_training=len(self._runs) == 1):
                self._add(source, number)

    def _add(self, source: Path, number: int) -> None:
        several = len(self._runs) > PAIR
        episodes = read_run(
            source, self._options.tokenizer, self._options.trust, quiet=self._options.follow
        )
        for episode in tqdm(
            episodes, desc=str(source), unit=" episodes", leave=False, disable=None
        ):
            world = self._worlds.draw(episode)
            if several:
                self._packer.add(episode, world=world, study=self._names[number])
            else:
                self._packer.add(episode, number, world)

    def write(self, path: Path, follow: float = 0.0) -> None:
        """Write the page; `follow` is the number of seconds after which it reloads itself."""
        runs = [str(run) for run in self._runs]
        studies = map(read_training, self._runs, self._names)
        head = {
            "runs": [", ".join(map(str, self._options.runs))] if len(runs) > PAIR else runs,
            "studies": [{**study, "run": number} for number, study in enumerate(studies) if study],
            "written": datetime.now().astimezone().isoformat(timespec="seconds"),
            "follow": follow,
            "episodes": self._packer.rows,
        }
        resolved = [run.resolve() for run in self._options.runs]
        names = [run.parent.name if run.name == FILE else run.name for run in resolved]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, build_page(" and ".join(names), head, self._packer.blocks()))

    def summary(self, path: Path) -> str:
        """Return the sentence for the terminal."""
        worlds = self._worlds
        said = f"{path} ({path.stat().st_size / 1e6:.1f} MB): {len(self._packer.rows)} episodes"
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
    path = _checked(options)
    book = Book(options)
    book.write(path)
    print(book.summary(path))
    _open(options, path)
    return 0


def follow(options: Namespace) -> int:
    """Rewrite the page whenever the runs' files change, until Ctrl-C; then write it once more
    without reloading.

    Also ends when the process that started it has ended.
    """
    path = _checked(options)
    seen: _State = {}
    opened = False
    waits = "" if _state(options.runs) else " (no episodes yet)"
    print(f"following {', '.join(map(str, options.runs))}{waits}; Ctrl-C ends", flush=True)
    try:
        parent = os.getppid()
        while os.getppid() == parent:
            began = time.monotonic()
            state = _state(options.runs)
            if state and state != seen:
                try:
                    book = Book(options)
                    book.write(path, _LOOK_S)
                    print(book.summary(path), flush=True)
                    opened = opened or _open(options, path)
                except ConfigError as error:  # perhaps half written
                    print(f"left as it is: {error}", flush=True)
                seen = state
            time.sleep(max(_LOOK_S, _IDLE_PER_BUSY * (time.monotonic() - began)))
    except KeyboardInterrupt:
        pass
    if not _state(options.runs):
        print("\nno episodes were written")
        return 0
    Book(options).write(path)
    print(f"\nthe page no longer reloads: {path}")
    return 0


def _state(runs: Sequence[Path]) -> _State:
    """Size and modification time of every file; empty until each run has one."""
    try:
        found = [path for run in expand_runs(runs) for path in files_of(run)]
    except ConfigError:
        return {}
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


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


def _checked(options: Namespace) -> Path:
    """The page's path; raises ConfigError for a number out of range, or if it would replace
    something else."""
    check_numbers(options, {"worlds": 0})
    if options.worlds and not find_spec("PIL"):
        options.worlds = 0
        print("note: worlds are not drawn, because Pillow is missing: pip install pillow")
    path: Path | None = options.out
    if path is not None and path.suffix != ".html" and path.exists():
        raise ConfigError(f"--out {path} exists, and does not end in .html; give another file")
    page = page_path(options)
    check_out(page.parent)
    return page


def _open(options: Namespace, path: Path) -> bool:
    return options.open and webbrowser.open(path.resolve().as_uri())
