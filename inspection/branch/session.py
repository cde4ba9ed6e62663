"""One call of `slime-verlog branch`: chooses states, plays the branches that are missing, and writes the values.

The folder is like that of `evaluate`. Each branch is one episode of `episodes.jsonl`, from its beginning; `setting`
names the turn, `repeat` counts the branches of a state, and `branch` says where it comes from.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embedded.run.ending import PROGRAM
from embedded.run.folder import write_text
from inspection.branch.values import Estimate, explainable, explained_by, mean_of, return_to_go
from inspection.evaluate.fingerprint import fingerprints
from inspection.evaluate.players import Kind, PlayerSpec, check_experts, read_player
from inspection.evaluate.session import OF_PLAYER, RUN, RunFolder, check_sources, exit_code, play_missing
from inspection.evaluate.table import SPEED_KEYS, Key, SweepPoint
from inspection.records import FILE, Record, env_spec_of, read_episodes, token_ids_of
from inspection.target import check_numbers
from inspection.text import align
from rollout.bridge.settings import check_keys, with_assignments
from rollout.spec import EpisodeSpec, Past
from slime_verlog import ConfigError, read_settings

VALUES = "values.json"
_KEPT = ("setting", "player", "repeat", "env_path", "task", "options", "max_turns", "task_name", "seed", "digests")
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
        task, seed = self.episode["task_name"], self.episode["seed"]
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
            raise ConfigError(f"{self.name} has no token ids, so a critic cannot read it; let the model play it")
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
        return EpisodeSpec(number, self.episode["task_name"], env, past=Past(past, digests, self.name))


def branch(options: Namespace) -> int:
    """Play the branches that are missing in `--out`, and write the values.

    Returns 0, 1 after more failures than allowed, or 130 after Ctrl-C. Raises SlimeVerlogError if it ends early.
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
    found = {state.key(k): (state, state.spec(k)) for state in states for k in range(options.times)}
    points = _points(states, config, options.set)
    jobs = [(point, _specs_of(setting, found)) for setting, point in points.items()]
    for point, specs in jobs:
        _check_sessions(point, specs)
    identity = {"player": player.identity(options), "config": config, "episodes": _digest(options.episodes)}
    with RunFolder(Path(options.out), player.name, identity, now) as folder:
        gammas = {setting: point.settings.gamma_step for setting, point in points.items()}

        def finish(key: Key, episode: dict[str, Any]) -> None:
            state, _ = found[key]
            episode["branch"] = _about(state, episode, options.episodes, gammas[state.setting])

        stopped = play_missing(player, jobs, options, folder, finish)
        played = [folder.rows[key] for key in found if key in folder.rows]
        if any(row["stop"] != "failed" for row in played):
            _write_values(states, folder, options, gammas, values)
        return exit_code(options, len(found), played, stopped)


def _values(states: Sequence[State], options: Namespace, player: PlayerSpec) -> Sequence[float]:
    """The values that the critic gives to the states; empty without one."""
    if options.critic is None:
        return []
    if options.sample is None or player.kind is not Kind.FOLDER:
        raise ConfigError("--critic needs --sample, and as --player a model folder of the critic's run")
    from inspection.branch.critic import values_of

    return values_of([state.prompt() for state in states], options.critic, Path(player.source))


def _check_times(options: Namespace, player: PlayerSpec) -> None:
    """Raise ConfigError for a number of branches that tells nothing."""
    if options.sample is not None and options.times < 2:
        raise ConfigError(f"--times {options.times}: --sample compares the branches of a state; give at least 2")
    is_fixed = player.source == "expert" or (player.source != "random" and options.temperature == 0)
    if is_fixed and options.times > 1:
        how = "expert" if player.source == "expert" else f"{player.name} at temperature 0"
        same = f"the player {how} continues a state the same way each time"
        raise ConfigError(f"--times {options.times}: {same}; give --times 1")


def _read_run(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the settings with which the episodes were played, and the fingerprints of the environments' files."""
    file = (path if path.is_dir() else path.parent) / RUN
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found["config"], found.get("sources", {})
    except FileNotFoundError as error:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; branch takes what {PROGRAM} evaluate writes") from error
        why = f"{path} has no {RUN}, so the settings of its episodes are unknown"
        raise ConfigError(f"{why}; branch takes what {PROGRAM} evaluate writes") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _digest(path: Path) -> str:
    with open(path / FILE if path.is_dir() else path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _choose(options: Namespace) -> list[State]:
    """Return the states to branch from; reads the file twice, so that only chosen episodes are in memory."""
    number = options.episode or (1 if options.sample is None else None)
    lengths: dict[int, int] = {}
    for place, episode in enumerate(read_episodes(options.episodes), 1):
        if number in (place, None) and (number or episode.get("stop") != "failed"):
            lengths[place] = len(episode["story"])
    if not lengths:
        wanted = f"no episode {number}" if number else "no episode that was played to its end"
        raise ConfigError(f"{options.episodes} has {wanted}")
    places = _draw(lengths, options.sample) if options.sample else _given(lengths, options.turn, options.episodes)
    turns: dict[int, list[int]] = defaultdict(list)
    for place, turn in places:
        turns[place].append(turn)
    states = []
    for place, episode in enumerate(read_episodes(options.episodes, 0), 1):
        if place in turns:
            kept = _slim(episode, f"{options.episodes}, episode {place},")
            states += [State(place, kept, turn) for turn in sorted(set(turns[place]))]
    return states


def _given(lengths: Mapping[int, int], turns: Sequence[int], path: Path) -> list[tuple[int, int]]:
    ((place, length),) = lengths.items()
    for turn in turns:
        if not 1 <= turn <= length:
            raise ConfigError(f"--turn {turn}: episode {place} of {path} has the turns 1 to {length}")
    return [(place, turn) for turn in turns]


def _draw(lengths: Mapping[int, int], count: int) -> list[tuple[int, int]]:
    """Draw turns of all episodes; a larger sample contains the smaller one."""
    places = [(place, turn) for place, length in lengths.items() for turn in range(1, length + 1)]
    if count > len(places):
        raise ConfigError(f"--sample {count}: the episodes have {len(places)} turns")
    random.Random(0).shuffle(places)
    return places[:count]


def _slim(episode: Record, where: str) -> dict[str, Any]:
    """The record without prompts; raises ConfigError if it does not name its environment."""
    if missing := [key for key in ("env_path", "task", "task_name", "seed", "setting") if episode.get(key) is None]:
        raise ConfigError(f"{where} has no {missing[0]}, so it cannot be played again")
    story = [{key: turn[key] for key in _OF_TURN if key in turn} for turn in episode["story"]]
    return {**{key: episode[key] for key in _KEPT if key in episode}, "story": story}


def _points(states: Sequence[State], config: Record, changes: Sequence[str]) -> dict[str, SweepPoint]:
    """The settings with which the episodes were played, by their name in the record."""
    changed = with_assignments({}, changes, "--set", "n_env=8")
    if others := [key for key in changed if key not in SPEED_KEYS]:
        keys = ", ".join(SPEED_KEYS)
        raise ConfigError(f"--set {others[0]}: a branch has the settings of its episode; only these can be set: {keys}")
    points = {}
    for setting in dict.fromkeys(state.setting for state in states):
        swept = setting.split(", ") if setting != "-" else []
        of_point = with_assignments({**config, **changed}, swept, "the setting of a record")
        points[setting] = SweepPoint({}, of_point, check_keys(of_point))
    return points


def _specs_of(setting: str, found: Mapping[Key, tuple[State, EpisodeSpec]]) -> dict[Key, EpisodeSpec]:
    return {key: spec for key, (state, spec) in found.items() if state.setting == setting}


def _check_sessions(point: SweepPoint, specs: Mapping[Key, EpisodeSpec]) -> None:
    """Raise ConfigError if OpenEnv servers have fewer sessions than branches are played at once."""
    for env in {spec.env.env_path: spec.env for spec in specs.values() if spec.env.env_path == "envs.openenv"}.values():
        from envs.openenv.session import count_sessions
        from envs.openenv.settings import OpenEnvSettings

        at_once = min(point.settings.n_env, len(specs))
        sessions = count_sessions(read_settings(OpenEnvSettings, env.options, "env."), at_once)
        if sessions < at_once:
            more = f"{at_once} branches would be played at once, and the servers have {sessions} free sessions"
            raise ConfigError(f"{more}; give --set n_env={max(sessions // 3, 1)}, or allow more on the servers")


def _about(state: State, episode: Record, path: Path, gamma: float) -> dict[str, Any]:
    """Where a branch comes from, and what it earned from its turn on; raises ConfigError if it ended before that."""
    new = episode["story"][state.turn - 1 :]
    if not new and episode["stop"] != "failed":
        ended = f"ended in turn {len(episode['story'])} ({episode['stop']}), before turn {state.turn}"
        raise ConfigError(f"the replay of {state.name} {ended}; a shorter context (--max-context-len) does that")
    return {
        "run": str(path),
        "episode": state.number,
        "turn": state.turn,
        "player": state.episode.get("player", "-"),
        "return_to_go": return_to_go(new, 1.0),
        "discounted": return_to_go(new, gamma),
    }


def _write_values(
    states: Sequence[State],
    folder: RunFolder,
    options: Namespace,
    gammas: Mapping[str, float],
    values: Sequence[float],
) -> None:
    """Write and print what is known of each state, and of a sample the explainable share and the critic's."""
    rows: list[dict[str, Any]] = []
    returns: dict[str, list[list[float]]] = {"return_to_go": [], "discounted": []}
    episodes: list[int] = []
    guesses: list[float] = []
    for number, state in enumerate(states):
        known = [folder.rows[key] for k in range(options.times) if (key := state.key(k)) in folder.rows]
        played = [row["branch"] for row in known if row["stop"] != "failed"]
        if not played:
            continue
        of_state = {name: [row[name] for row in played] for name in returns}
        rows.append(_row(state, of_state, gammas[state.setting]) | {"failed": len(known) - len(played)})
        if len(played) > 1:
            episodes.append(state.number)
            guesses += values[number : number + 1]
            for name, found in of_state.items():
                returns[name].append(found)
    shares = {}
    if options.sample is not None and len(episodes) > 1:
        shares = {name: explainable(found, episodes) for name, found in returns.items()}
    saved = {"states": rows, "explainable": {name: asdict(share) for name, share in shares.items()}}
    if shares and guesses:
        of_critic = explained_by(guesses, returns["discounted"], episodes)
        saved["critic"] = asdict(of_critic)
        print(f"the critic explains {of_critic.text()} of the variance of the discounted return")
    write_text(folder.path / VALUES, json.dumps(saved, indent=1) + "\n")
    if options.turn is not None:
        print("\n".join(_table(rows)))
    for name, share in shares.items():
        of = "return" if name == "return_to_go" else f"discounted return (gamma_step {_all(gammas)})"
        of_what = f"{len(episodes)} states of {len(set(episodes))} episodes"
        print(f"the state explains {share.text()} of the variance of the {of} from {of_what}")
    print(f"\nwritten to {folder.path}: {FILE}, {VALUES}", file=sys.stderr)


def _all(gammas: Mapping[str, float]) -> str:
    return ", ".join(f"{gamma:g}" for gamma in sorted(set(gammas.values())))


def _row(state: State, returns: Mapping[str, Sequence[float]], gamma: float) -> dict[str, Any]:
    """A state's values as JSON: means with intervals, and what the recorded episode earned from there."""
    recorded = state.episode["story"][state.turn - 1 :]
    own = {"return_to_go": return_to_go(recorded, 1.0), "discounted": return_to_go(recorded, gamma)}
    where = {"setting": state.setting, "task": state.episode["task_name"], "seed": state.episode["seed"]}
    means = {name: asdict(mean_of(values)) for name, values in returns.items()}
    return {"episode": state.number, **where, "turn": state.turn, "n": len(returns["discounted"]), **means, "own": own}


def _table(rows: Sequence[Record]) -> list[str]:
    head = ["task", "episode", "turn", "n", "failed", "return to go", "95 %", "discounted", "95 %", "recorded"]
    lines = [head]
    for row in rows:
        plain, discounted = Estimate(**row["return_to_go"]), Estimate(**row["discounted"])
        cells = [f"{plain.value:.3f}", plain.interval(), f"{discounted.value:.3f}", discounted.interval()]
        counts = [str(row[name]) for name in ("episode", "turn", "n", "failed")]
        lines.append([row["task"], *counts, *cells, f"{row['own']['return_to_go']:.3f}"])
    return align(lines, 1)
