"""Evaluates a checkpoint with any YAML and any engine with SGLang's API, and prints a table with standard errors.

    python -m inspection.evaluate --config custom_configs/babyai.yaml --checkpoint MODEL --engine http://HOST:PORT
    python -m inspection.evaluate --config ... --checkpoint MODEL --sweep memory.n=1,2,4,8,16,32

Without --engine, the embedded engine serves the checkpoint on this machine. `--sweep` evaluates several settings.
Every episode is written to `OUT/episodes.jsonl`, which `inspection.viewer` shows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import yaml

from rollout.bridge.framework import Sample, run
from rollout.bridge.sample import facts_of
from rollout.bridge.settings import check_keys, read_yaml
from rollout.data_source import EpisodeSource, build_each_task
from rollout.evaluate import evaluate
from rollout.play.runtime import close_runtimes
from slime_verlog import ConfigError, command

COLUMNS = ("success", "return", "progression", "turns", "valid_action_ratio")


def rollout_namespace(config: dict[str, Any], checkpoint: str, engine: str, options: Namespace) -> Namespace:
    """slime's `args` as the rollout reads them: flags and the YAML's top-level keys.

    Raises:
        ConfigError: `engine` is not an address with a port.
    """
    address = urlparse(engine)
    if not address.hostname or not address.port:
        raise ConfigError(f"--engine must look like http://127.0.0.1:30000, got {engine!r}")
    return Namespace(
        hf_checkpoint=checkpoint,
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        global_batch_size=1,
        rollout_max_response_len=options.max_response_len,
        rollout_max_context_len=options.max_context_len,
        rollout_temperature=options.temperature,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_seed=options.seed,
        **config,
    )


def summarize(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Mean, standard error and n of each column over the episodes of one task."""
    table: dict[str, dict[str, float]] = {}
    for column in COLUMNS:
        values = [float(facts_of(sample)[column]) for sample in samples]
        n = len(values)
        mean = sum(values) / n
        variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
        table[column] = {"mean": mean, "se": (variance / n) ** 0.5, "n": n}
    return table


def set_key(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the YAML's mapping with the dotted key `path` set."""
    head, _, rest = path.partition(".")
    inner = value if not rest else set_key(dict(config.get(head) or {}), rest, value)
    return {**config, head: inner}


def set_keys(config: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """A copy of the YAML's mapping with several dotted keys set."""
    for path, value in point.items():
        config = set_key(config, path, value)
    return config


def sweep_points(sweeps: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of `key=v1,v2,...` settings; a single empty point without any.

    Raises:
        ConfigError: a sweep does not have this form.
    """
    axes: list[list[tuple[str, Any]]] = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not values:
            raise ConfigError(f"--sweep and --set look like memory.n=1,2,4, got {sweep!r}")
        axes.append([(key, yaml.safe_load(value)) for value in values.split(",")])
    return [dict(point) for point in itertools.product(*axes)]


def evaluate_point(config: dict[str, Any], options: Namespace, engine: str) -> dict[str, list[Sample]]:
    """Play all held-out episodes with one setting; returns samples by task name."""
    args = rollout_namespace(config, options.checkpoint, engine, options)
    source = EpisodeSource(args)

    async def play() -> Any:
        try:
            return await evaluate(args, source)
        finally:
            await close_runtimes()

    return {name: group["samples"] for name, group in run(play()).data.items()}


@contextlib.contextmanager
def engine_at(options: Namespace) -> Iterator[str]:
    """The address of --engine, or of an embedded engine that runs while the context is open."""
    if options.engine:
        yield options.engine
        return
    from embedded.engine.engine import EngineOptions
    from embedded.engine.server import EngineServer

    with EngineServer(EngineOptions(model_path=options.checkpoint, seed=options.seed)) as server:
        yield server.url


def row_text(label: str, task: str, table: dict[str, dict[str, float]]) -> str:
    """One line of the printed table."""
    cells = [f"{table[c]['mean']:8.3f} ±{table[c]['se']:6.3f}" for c in COLUMNS]
    return f"{label:<28}{task:<32}{table['success']['n']:>5} " + " ".join(cells)


def episode_line(label: str, sample: Sample) -> str:
    """One episode as a line of JSON for the viewer."""
    keys = ("return", "task_name", "seed", "stop", "turns", "success", "progression")
    keys += ("valid_action_ratio", "story", "fault")
    return json.dumps({"setting": label, **{key: facts_of(sample)[key] for key in keys}})


@command()
def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate every point of the sweep; print the table and write it with all episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="custom YAML, as for --custom-config-path")
    parser.add_argument("--checkpoint", required=True, help="Hugging Face folder")
    parser.add_argument("--engine", help="address of an engine or router; default: the embedded engine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one YAML key")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=V1,V2", help="one table row per value")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-response-len", type=int, default=512)
    parser.add_argument("--max-context-len", type=int, default=None)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", default="outputs/evaluation", help="folder for table.json and episodes.jsonl")
    options = parser.parse_args(arguments)
    config = read_yaml(options.config)
    for point in sweep_points(options.set):
        config = set_keys(config, point)
    points = [(point, set_keys(config, point)) for point in sweep_points(options.sweep)]
    for _, swept in points:
        build_each_task(check_keys(swept))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    print(f"{'setting':<28}{'task':<32}{'n':>5} " + " ".join(f"{column:>16}" for column in COLUMNS))
    with engine_at(options) as engine, open(out / "episodes.jsonl", "w", encoding="utf-8") as episodes:
        for point, swept in points:
            label = ", ".join(f"{key}={value}" for key, value in point.items()) or "-"
            for task, samples in evaluate_point(swept, options, engine).items():
                table = summarize(samples)
                results.append({"setting": point, "task": task, **table})
                print(row_text(label, task, table), flush=True)
                episodes.writelines(episode_line(label, sample) + "\n" for sample in samples)
    (out / "table.json").write_text(json.dumps(results, indent=1))
    print(f"table: {out / 'table.json'}; look at the episodes with: python -m inspection.viewer {out}/episodes.jsonl")


if __name__ == "__main__":
    main()
