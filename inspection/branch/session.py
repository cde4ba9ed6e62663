"""One call of `slime-verlog branch`: chooses states, plays the branches that are missing, and
writes the values.

The folder is like that of `evaluate`. Each branch is one episode of `episodes.jsonl`, from its
beginning; `setting` names the turn, `repeat` counts the branches of a state, and `branch` says
where it comes from.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embedded.run.ending import PROGRAM
from embedded.run.folder import write_text
from inspection.branch.values import Estimate, explained, mean_of, return_to_go
from inspection.evaluate.fingerprint import fingerprints
from inspection.evaluate.players import Kind, PlayerSpec, check_experts, read_player
from inspection.evaluate.session import (
    OF_PLAYER,
    RUN,
    RunFolder,
    check_sources,
    exit_code,
    play_missing,
)
from inspection.evaluate.table import SPEED_KEYS, Key, SweepPoint
from inspection.records import FILE, Record, env_spec_of, read_episodes, token_ids_of
from inspection.target import check_numbers
from inspection.text import align
from rollout.bridge.settings import check_keys, set_key, with_assignments
from rollout.spec import EpisodeSpec, Past
from slime_verlog import ConfigError, read_settings

VALUES = "values.json"
RETURNS = ("return_to_go", "discounted")
"""What a branch earned from its turn on: the sum, and discounted with `gamma_step`."""
_KEPT = (
    "setting",
    "swept",
    "player",
    "repeat",
    "env_path",
    "task",
    "options",
    "max_turns",
    "task_name",
    "seed",
    "digests",
)
_OF_TURN = ("response", "summary", "token_ids", "reward", "moves")


@dataclass(frozen=True)
class State:
    """The state before one turn of a recorded episode."""

    number: int
    """Of the episode in its file, from 1."""
    episode: Record
    turn: int
    """From 1."""

    @property
    def name(self) -> str:
        """What errors call the episode."""
        task = self.episode["task_name"]
        seed = self.episode["seed"]
        return f"episode {self.number} of {self.episode['env_path']} (task {task}, seed {seed})"

    @property
    def setting(self) -> str:
        """The point of the sweep in which the episode was played."""
        return self.episode["setting"]

    def key(self, branch: int) -> Key:
        """What tells this branch, counted from 0, apart from the others."""
        known = [self.setting] if self.setting != "-" else []
        known += [f"repeat {repeat}"] if (repeat := self.episode.get("repeat")) else []
        setting = ", ".join([*known, f"turn {self.turn}"])
        return setting, self.episode["task_name"], self.episode["seed"], branch

    def prompt(self) -> list[int]:
        """Token ids of the turn's prompt; raises ConfigError if the record has none."""
        ids = list(token_ids_of(self.episode["story"]))[self.turn - 1]
        if ids is None:
            raise ConfigError(
                f"{self.name} has no token ids, so a critic cannot read it; let the model play it"
            )
        return ids[0]

    def spec(self, branch: int) -> EpisodeSpec:
        """Return what plays this branch; raises ConfigError for a record without digests."""
        past = self.episode["story"][: self.turn - 1]
        steps = sum("summary" not in turn for turn in past)
        digests = (self.episode.get("digests") or ())[: steps + 1]
        if len(digests) <= steps:
            why = "has no digests of its observations, so a replay cannot be checked"
            raise ConfigError(f"{self.name} {why}; play it again with {PROGRAM} evaluate")
        # The sampling depends on the id, which must not be that of the recorded episode.
        number = self.turn * 1_000_000 + branch + 1
        env = env_spec_of(self.episode)
        return EpisodeSpec(
            number, self.episode["task_name"], env, past=Past(past, digests, self.name)
        )


def branch(options: Namespace) -> int:
    """Play the branches that are missing in `--out`, and write the values.

    Returns 0, 1 after more failures than allowed, or 130 after Ctrl-C. Raises SlimeVerlogError if
    it ends early.
    """
    check_numbers(options, {"times": 1, "sample": 1, "episode": 1, **OF_PLAYER})
    player = read_player(options)
    _check_times(options, player)
    config, sources = _read_run(options.episodes)
    states = _choose(options)
    values = _values(states, options, player)
    paths = {state.episode["env_path"] for state in states}
    if player.source == "expert":
        check_experts(paths)
    now = fingerprints(paths, config)
    check_sources(options.episodes, sources, now, f"play them again with {PROGRAM} evaluate")
    points = _points(states, config, options.set)
    by_key = {state.key(branch): state for state in states for branch in range(options.times)}
    jobs = []
    for setting, point in points.items():
        specs = {
            key: state.spec(key[-1]) for key, state in by_key.items() if state.setting == setting
        }
        _check_sessions(point, specs)
        jobs.append((point, specs))
    identity = {
        "player": player.identity(options),
        "config": config,
        "episodes": _digest(options.episodes),
    }
    with RunFolder(Path(options.out), player.name, identity, now) as folder:
        gammas = {setting: point.settings.gamma_step for setting, point in points.items()}

        def finish(key: Key, episode: Record) -> None:
            state = by_key[key]
            episode["branch"] = _about(state, episode, options.episodes, gammas[state.setting])

        stopped = play_missing(player, jobs, options, folder, finish)
        played = [folder.rows[key] for key in by_key if key in folder.rows]
        if any(row["stop"] != "failed" for row in played):
            _write_values(states, folder, options, gammas, values)
        return exit_code(options, len(by_key), played, stopped)


def _values(states: Sequence[State], options: Namespace, player: PlayerSpec) -> Sequence[float]:
    """The values that the critic gives to the states; empty without one."""
    if options.critic is None:
        return []
    if options.sample is None or player.kind is not Kind.FOLDER:
        raise ConfigError(
            "--critic needs --sample, and as --player a model folder of the critic's run"
        )
    from inspection.branch.critic import values_of

    return values_of([state.prompt() for state in states], options.critic, Path(player.source))


def _check_times(options: Namespace, player: PlayerSpec) -> None:
    """Raise ConfigError for a number of branches that tells nothing."""
    if options.sample is not None and options.times < 2:
        raise ConfigError(
            f"--times {options.times}: --sample compares the branches of a state; give at least 2"
        )
    is_fixed = player.source == "expert" or (player.source != "random" and options.temperature == 0)
    if is_fixed and options.times > 1:
        how = "expert" if player.source == "expert" else f"{player.name} at temperature 0"
        same = f"the player {how} continues a state the same way each time"
        raise ConfigError(f"--times {options.times}: {same}; give --times 1")


def _read_run(path: Path) -> tuple[Record, Mapping[str, str]]:
    """Return the settings with which the episodes were played, and the fingerprints of the
    environments' files."""
    file = (path if path.is_dir() else path.parent) / RUN
    if not file.is_file():
        why = f"there is no {file}, so the settings of the episodes are unknown"
        raise ConfigError(f"{why}; branch takes what {PROGRAM} evaluate writes")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found["config"], found.get("sources", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _digest(path: Path) -> str:
    with open(path / FILE if path.is_dir() else path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _choose(options: Namespace) -> list[State]:
    """Return the states to branch from; raises ConfigError if there are fewer."""
    number = options.episode or (1 if options.sample is None else None)
    states: list[State] = []
    for place, episode in enumerate(read_episodes(options.episodes), 1):
        if place == number or (number is None and episode.get("stop") != "failed"):
            kept = _slim(episode, f"{options.episodes}, episode {place},")
            states += [State(place, kept, turn) for turn in range(1, len(kept["story"]) + 1)]
    if not states:
        wanted = f"no episode {number}" if number else "no episode that was played to its end"
        raise ConfigError(f"{options.episodes} has {wanted}")
    if options.sample is None:
        for turn in options.turn:
            if not 1 <= turn <= len(states):
                turns = f"episode {number} of {options.episodes} has the turns 1 to {len(states)}"
                raise ConfigError(f"--turn {turn}: {turns}")
        return [states[turn - 1] for turn in sorted(set(options.turn))]
    if options.sample > len(states):
        raise ConfigError(f"--sample {options.sample}: the episodes have {len(states)} turns")
    random.Random(0).shuffle(states)  # so a larger sample contains the smaller one
    return sorted(states[: options.sample], key=lambda state: (state.number, state.turn))


def _slim(episode: Record, where: str) -> Record:
    """The record without prompts; raises ConfigError if it does not name its environment."""
    if origin := episode.get("branch"):
        raise ConfigError(
            f"{where} is a branch itself; branch from the episodes that it continues, in "
            f"{origin['run']}"
        )
    needed = ["env_path", "task", "task_name", "seed", "setting"]
    if episode.get("setting", "-") != "-":
        needed.append("swept")
    if missing := [key for key in needed if episode.get(key) is None]:
        raise ConfigError(f"{where} has no {missing[0]}, so it cannot be played again")
    story = [{key: turn[key] for key in _OF_TURN if key in turn} for turn in episode["story"]]
    return {key: episode[key] for key in _KEPT if key in episode} | {"story": story}


def _points(
    states: Sequence[State], config: Record, changes: Sequence[str]
) -> dict[str, SweepPoint]:
    """The settings with which the episodes were played, by their name in the record."""
    changed = with_assignments({}, changes, "--set", "n_env=8")
    if others := [key for key in changed if key not in SPEED_KEYS]:
        keys = ", ".join(SPEED_KEYS)
        raise ConfigError(
            f"--set {others[0]}: a branch has the settings of its episode; only these can be set: "
            f"{keys}"
        )
    points = {}
    for setting, episode in {state.setting: state.episode for state in states}.items():
        of_point: Record = {**config, **changed}
        for key, value in episode.get("swept", {}).items():
            of_point = set_key(of_point, key, value)
        points[setting] = SweepPoint({}, of_point, check_keys(of_point))
    return points


def _check_sessions(point: SweepPoint, specs: Mapping[Key, EpisodeSpec]) -> None:
    """Raise ConfigError if OpenEnv servers have fewer sessions than branches are played at once."""
    options = next(
        (spec.env.options for spec in specs.values() if spec.env.env_path == "envs.openenv"), None
    )
    if options is None:
        return
    from envs.openenv.session import count_sessions
    from envs.openenv.settings import OpenEnvSettings

    at_once = min(point.settings.n_env, len(specs))
    sessions = count_sessions(read_settings(OpenEnvSettings, options, "env."), at_once)
    if sessions < at_once:
        more = f"{at_once} branches would be played at once, and the servers have {sessions} free sessions"
        raise ConfigError(
            f"{more}; give --set n_env={max(sessions // 3, 1)}, or allow more on the servers"
        )


def _about(state: State, episode: Record, path: Path, gamma: float) -> Record:
    """Where a branch comes from, and what it earned from its turn on; raises ConfigError if it
    ended before that."""
    new = episode["story"][state.turn - 1 :]
    if not new and episode["stop"] != "failed":
        ended = (
            f"ended in turn {len(episode['story'])} ({episode['stop']}), before turn {state.turn}"
        )
        raise ConfigError(
            f"the replay of {state.name} {ended}; a shorter context (--max-context-len) does that"
        )
    about = {
        "run": str(path),
        "episode": state.number,
        "turn": state.turn,
        "player": state.episode.get("player", "-"),
    }
    return about | _returns(new, gamma)


def _returns(turns: Sequence[Record], gamma: float) -> dict[str, float]:
    return {"return_to_go": return_to_go(turns, 1.0), "discounted": return_to_go(turns, gamma)}


def _write_values(
    states: Sequence[State],
    folder: RunFolder,
    options: Namespace,
    gammas: Mapping[str, float],
    values: Sequence[float],
) -> None:
    """Write and print what is known of each state, and of a sample the explainable share and the
    critic's."""
    rows: list[Record] = []
    compared: list[tuple[State, list[Record]]] = []
    guesses: list[float] = []
    for number, state in enumerate(states):
        keys = map(state.key, range(options.times))
        known = [folder.rows[key] for key in keys if key in folder.rows]
        played = [row["branch"] for row in known if row["stop"] != "failed"]
        if played:
            failed = len(known) - len(played)
            rows.append(_row(state, played, gammas[state.setting]) | {"failed": failed})
        if len(played) > 1:
            compared.append((state, played))
            guesses += values[number : number + 1]
    shares: dict[str, Estimate] = {}
    episodes = [state.number for state, _ in compared]
    if options.sample is not None and len(episodes) > 1:
        for name in RETURNS:
            returns = [[branch[name] for branch in played] for _, played in compared]
            shares[name] = explained(returns, episodes)
    saved: Record = {"states": rows, "explainable": shares}
    if shares and guesses:
        discounted = [[branch["discounted"] for branch in played] for _, played in compared]
        saved["critic"] = of_critic = explained(discounted, episodes, guesses)
        found = f"{of_critic.value:.3f} {of_critic.interval()}"
        print(f"the critic explains {found} of the variance of the discounted return")
    write_text(folder.path / VALUES, json.dumps(saved, indent=1, default=vars) + "\n")
    if options.turn is not None:
        print("\n".join(_table(rows)))
    of_what = f"{len(episodes)} states of {len(set(episodes))} episodes"
    used = ", ".join(f"{gamma:g}" for gamma in sorted(set(gammas.values())))
    for name, share in shares.items():
        of = "return" if name == "return_to_go" else f"discounted return (gamma_step {used})"
        found = f"{share.value:.3f} {share.interval()}"
        print(f"the state explains {found} of the variance of the {of} from {of_what}")
    print(f"\nwritten to {folder.path}: {FILE}, {VALUES}", file=sys.stderr)


def _row(state: State, played: Sequence[Record], gamma: float) -> Record:
    """A state's values: means with intervals, and what the recorded episode earned from there."""
    where = {
        "setting": state.setting,
        "task": state.episode["task_name"],
        "seed": state.episode["seed"],
    }
    means = {name: mean_of([branch[name] for branch in played]) for name in RETURNS}
    own = _returns(state.episode["story"][state.turn - 1 :], gamma)
    return {
        "episode": state.number,
        **where,
        "turn": state.turn,
        "n": len(played),
        **means,
        "own": own,
    }


def _table(rows: Sequence[Record]) -> list[str]:
    lines = [
        [
            "task",
            "episode",
            "turn",
            "n",
            "failed",
            "return to go",
            "95 %",
            "discounted",
            "95 %",
            "recorded",
        ]
    ]
    for row in rows:
        line = [row["task"], *(str(row[name]) for name in ("episode", "turn", "n", "failed"))]
        for name in RETURNS:
            line += [f"{row[name].value:.3f}", row[name].interval()]
        lines.append([*line, f"{row['own']['return_to_go']:.3f}"])
    return align(lines, 1)
