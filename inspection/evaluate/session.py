"""One call of `slime-verlog evaluate`: checks everything, plays what is missing, and writes the
results.

The run's folder has `run.json` with its configuration and fingerprints of the environment's files,
and `episodes.jsonl`, to which episodes are appended. Invariant: the file holds at most one episode
per setting, task, seed and repeat, all of one configuration, one version of the environment and one
player.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from embedded.run.ending import PROGRAM
from embedded.run.folder import check_same, locked, write_text
from inspection.evaluate.fingerprint import fingerprints
from inspection.evaluate.players import Kind, PlayerSpec, check_experts, read_player
from inspection.evaluate.playing import Play, open_engine, open_player
from inspection.evaluate.table import Key, SweepPoint, build_table, read_sweep, without_speed
from inspection.records import (
    FILE,
    Record,
    append_episode,
    check_table_keys,
    read_episodes,
    replacing,
    without_large,
)
from inspection.target import check_numbers
from rollout.play.loop import gather
from rollout.spec import EpisodeSpec
from slime_verlog import BAR_S, INTERRUPTED, ConfigError, SlimeVerlogError

MAX_FIRST_FAILURES = 8
"""A run ends early if its first episodes all failed, as many as this and more than
--allow-failures."""

OF_PLAYER = {
    "max_response_len": 1,
    "max_context_len": 1,
    "allow_failures": 0,
    "temperature": 0,
    "seed": 0,
}
"""Least values of the player's options."""

RUN = "run.json"
Job = tuple[SweepPoint, Mapping[Key, EpisodeSpec]]
"""The settings to play with, and the episodes."""


class RunFolder(ExitStack):
    """A run's folder; a context manager that keeps other processes from writing into it."""

    def __init__(
        self, path: Path, player: str, identity: Record, sources: Mapping[str, str]
    ) -> None:
        """Open the folder, or make it; raises ConfigError if it is in use, unusable, or another
        run's.

        `sources` are the fingerprints of the environments' files.
        """
        super().__init__()
        self.path = path
        self.player = player
        self.rows: dict[Key, Record] = {}
        """Finished episodes without their messages; failed ones of this call included."""
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").touch()
        self.enter_context(locked(path / ".lock"))
        try:
            self._check(json.loads(json.dumps(identity, default=str)), sources)
            self._read()
        except BaseException:
            self.close()  # nobody else would release the lock
            raise

    def append(self, episode: Record, setting: str) -> None:
        """Keep an episode."""
        append_episode(self.path / FILE, episode, self.player, setting)
        self._add({"setting": setting, "player": self.player, **episode})

    def _add(self, episode: Record) -> None:
        key = (episode["setting"], episode["task_name"], episode["seed"], episode.get("repeat", 0))
        self.rows[key] = without_large(episode)

    def _check(self, identity: Record, sources: Mapping[str, str]) -> None:
        """Compare with the run whose episodes are here; write `run.json` into a folder without
        any."""
        file = self.path / RUN
        episodes = self.path / FILE
        if not episodes.exists() or not episodes.stat().st_size:
            write_text(file, json.dumps({**identity, "sources": sources}, indent=1))
            return
        if not file.exists():
            raise ConfigError(
                f"{self.path} has {FILE} but no {RUN}: another command wrote it; give another --out"
            )
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or not isinstance(found.get("sources", {}), dict):
                raise ValueError("it does not describe a run")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; give another --out") from error
        check_sources(
            self.path,
            found.pop("sources", {}),
            sources,
            f"give another --out, or delete {self.path}",
        )
        check_same(self.path, found, identity)

    def _read(self) -> None:
        """Read the finished episodes; drop failed ones, and a last line that was cut, from the
        file."""
        file = self.path / FILE
        if not file.exists():
            return
        with replacing(file) as part, open(part, "w", encoding="utf-8", errors="replace") as kept:
            for number, episode in enumerate(read_episodes(file), 1):
                check_table_keys(episode, f"{file}, line {number},")
                if episode["stop"] != "failed":
                    self._add(episode)
                    kept.write(json.dumps(episode, ensure_ascii=False) + "\n")


def check_sources(
    path: Path, known: Mapping[str, str], sources: Mapping[str, str], advice: str
) -> None:
    """Raise ConfigError if the environment's files are not those of the episodes at `path`."""
    changed = [name for name, digest in sources.items() if known.get(name, digest) != digest]
    if changed:
        other = f"{path} holds episodes of another version of the environment"
        raise ConfigError(f"{other}: {', '.join(changed)} changed since; {advice}")


class StoppedError(SlimeVerlogError):
    """The run ended before all episodes were played."""


def evaluate(options: Namespace) -> int:
    """Play the episodes that are missing in `--out`, and write the table.

    Returns 0, 1 after more failures than allowed, or 130 after Ctrl-C. Raises SlimeVerlogError if
    it ends early.
    """
    check_numbers(options, {"episodes": 1, "repeats": 1, **OF_PLAYER})
    player = read_player(options)
    if player.kind is Kind.SCRIPTED and options.repeats > 1:
        raise ConfigError(
            f"--repeats {options.repeats}: the player {player.name} plays a seed the same way each "
            "time"
        )
    config, points = read_sweep(options)
    paths = {spec.env.env_path for point in points for spec in point.episodes.values()}
    if player.source == "expert":
        check_experts(paths)
    wanted = [key for point in points for key in point.episodes]
    identity = {"player": player.identity(options), "config": without_speed(config)}
    with RunFolder(Path(options.out), player.name, identity, fingerprints(paths, config)) as folder:
        stopped = play_missing(
            player, [(point, point.episodes) for point in points], options, folder
        )
        played = [folder.rows[key] for key in wanted if key in folder.rows]
        if played:
            _write_table(points, folder)
        return exit_code(options, len(wanted), played, stopped)


def _write_table(points: Sequence[SweepPoint], folder: RunFolder) -> None:
    table = build_table(folder.player, points, folder.rows)
    write_text(folder.path / "table.json", table.as_json())
    write_text(folder.path / "table.md", table.as_markdown())
    name = shlex.quote(str(folder.path))
    print(f"{table.as_markdown()}\nwritten to {folder.path}: episodes.jsonl, table.json, table.md")
    print(f"read the episodes:  {PROGRAM} view {name}\nsee what to change: {PROGRAM} report {name}")


def play_missing(
    player: PlayerSpec,
    jobs: Sequence[Job],
    options: Namespace,
    folder: RunFolder,
    finish: Callable[[Key, Record], None] = lambda key, episode: None,
) -> BaseException | None:
    """Play the episodes that the folder lacks; return the error or the Ctrl-C that stopped it, None
    at the end.

    `finish` is called with each episode before it is written.
    """
    wanted = [key for _, episodes in jobs for key in episodes]
    known = sum(key in folder.rows for key in wanted)
    if known:
        print(f"{known} of {len(wanted)} episodes are already in {folder.path}", file=sys.stderr)
    if known == len(wanted):
        return None
    at_once = max(min(point.settings.n_env, len(episodes)) for point, episodes in jobs)

    async def play(engine: Namespace, progress: _Progress) -> None:
        for point, episodes in jobs:
            missing = {key: spec for key, spec in episodes.items() if key not in folder.rows}
            if missing:
                async with open_player(player, point, options, engine) as play_one:
                    await _play_all(missing, point, play_one, finish, progress)

    try:
        with open_engine(player, options, at_once) as engine:
            progress = _Progress(folder, wanted, options.allow_failures)
            with progress.bar:
                asyncio.run(play(engine, progress))
    except (KeyboardInterrupt, SlimeVerlogError) as error:
        return error
    return None


async def _play_all(
    missing: Mapping[Key, EpisodeSpec],
    point: SweepPoint,
    play_one: Play,
    finish: Callable[..., None],
    progress: _Progress,
) -> None:
    """Play the episodes, `n_env` at a time; an error ends all of them."""
    places = asyncio.Semaphore(point.settings.n_env)

    async def one(key: Key, spec: EpisodeSpec) -> None:
        setting, _, _, repeat = key
        async with places:
            episode = await play_one(spec)
            if repeat:
                episode["repeat"] = repeat
            if point.values:
                episode["swept"] = point.values
            finish(key, episode)
            progress.add(episode, setting)

    await gather(one(key, spec) for key, spec in missing.items())


class _Progress:
    """Keeps each episode as it ends, shows the running win rate, and prints the first fault."""

    def __init__(self, folder: RunFolder, wanted: Sequence[Key], allowed: int) -> None:
        self._folder = folder
        self._allowed = allowed
        known = [folder.rows[key] for key in wanted if key in folder.rows]
        self.played = len(known)
        self.won = sum(row["success"] for row in known)
        self.failed = 0
        self.bar = tqdm(
            total=len(wanted),
            initial=len(known),
            unit="episode",
            desc=folder.player,
            mininterval=BAR_S,
        )

    def add(self, episode: Record, setting: str) -> None:
        """Keep an episode; raises StoppedError if the first ones all failed."""
        self._folder.append(episode, setting)
        if episode["stop"] == "failed":
            self.failed += 1
            if self.failed == 1:
                tqdm.write(f"the first fault: {_fault_of(episode)}", file=sys.stderr)
        else:
            self.played += 1
            self.won += episode["success"]
        rate = f"{self.won / self.played:.0%} won" if self.played else "none won"
        self.bar.set_postfix_str(
            f"{rate}, {self.failed} failed" if self.failed else rate, refresh=False
        )
        self.bar.update()
        if not self.played and self.failed >= max(MAX_FIRST_FAILURES, self._allowed + 1):
            raise StoppedError(
                f"the first {self.failed} episodes all failed; the last: {_fault_of(episode)}"
            )


def _fault_of(episode: Record) -> str:
    """The episode's fault in one sentence: task, seed, error, and the line that raised it."""
    text = (episode["fault"] or "unknown").partition("\nto reproduce:")[0].strip()
    said = text.splitlines()[0]
    lines = re.findall(r'File "([^"]+)", line (\d+)', text)
    if lines and not re.search(r"\.py:\d", said):
        said += " ({}:{})".format(*lines[-1])
    return f"task {episode['task_name']}, seed {episode['seed']}: {said}"


def exit_code(
    options: Namespace, wanted: int, played: Sequence[Record], stopped: BaseException | None
) -> int:
    """Say what failed or stopped, and return the exit code; raises StoppedError for an error that
    ended the run."""
    failed = [row for row in played if row["stop"] == "failed"]
    kept = f"{len(played) - len(failed)} of {wanted} episodes are in {Path(options.out)}"
    kept += ", and the same command plays the others"
    if isinstance(stopped, SlimeVerlogError):
        raise StoppedError(f"{stopped}; {kept}" if played else str(stopped)) from stopped
    if stopped is not None:
        print(f"interrupted: {kept}", file=sys.stderr)
        return INTERRUPTED
    if len(failed) <= options.allow_failures:
        return 0
    advice = f"--allow-failures {len(failed)} accepts them; the same command plays them again"
    first = _fault_of(failed[0])
    print(
        f"error: {len(failed)} of {wanted} episodes failed; the first: {first} ({advice})",
        file=sys.stderr,
    )
    return 1
