"""Plays one episode of an environment of verifiers, in verifiers' own Python: `episode.json` in,
`result.json` out."""

import asyncio
import importlib
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

# These are no faults.
BY_THE_MODEL = (
    "EmptyModelResponseError",
    "InvalidModelResponseError",
    "ToolCallError",
    "ToolParseError",
)


def play_environment(
    name: str, args: dict[str, Any], split: str, examples: int | None, seed: int
) -> float:
    """Play a row of what a module's `load_environment` returns (verifiers before 0.4)."""
    verifiers: Any = importlib.import_module("verifiers")
    env = verifiers.load_environment(name, **args)
    rows = env.get_dataset() if split == "train" else env.get_eval_dataset()
    row = rows[seed % min(len(rows), examples or len(rows))]
    config = importlib.import_module("verifiers.types").ClientConfig
    client = config(api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"])
    output = asyncio.run(env.run_rollout(row, client, os.environ["AGENT_MODEL"], {}))
    error = output.get("error")
    if error and error["error"] not in BY_THE_MODEL:
        sys.exit(f"the rollout failed: {error['error_chain_str']}")
    return output["reward"]


def play_taskset(name: str, args: dict[str, Any], examples: int | None, seed: int) -> float:
    """Play a task of a taskset (verifiers from 0.4); the score is the mean reward of the agents
    that are trained."""
    import verifiers.v1 as vf

    env = vf.load_environment(
        vf.resolve_env_config({**args, "taskset": {"id": name, **args.get("taskset", {})}})
    )
    if examples is None and not env.taskset.bounded:
        sys.exit(f"the taskset {name} is endless; set env.examples")
    count = examples or sum(1 for _ in env.taskset)
    task = next(itertools.islice(env.taskset, seed % count, None))
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    context = vf.ModelContext(
        client=client, model=os.environ["AGENT_MODEL"], sampling=vf.SamplingConfig()
    )

    async def play() -> vf.Episode:
        async with env.serving():
            return await env.run_episode(task, context)

    episode = asyncio.run(play())
    for error in (*episode.errors, *(error for trace in episode.traces for error in trace.errors)):
        sys.exit(f"the rollout failed: {error.type}: {error.message}")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    given = json.loads(Path("episode.json").read_text())
    ident = given.pop("id")
    split = given.pop("split")
    module = ident.rsplit("/", 1)[-1].replace("-", "_")
    is_classic = importlib.util.find_spec(module) and hasattr(
        importlib.import_module(module), "load_environment"
    )
    score = (
        play_environment(module, split=split, **given)
        if is_classic
        else play_taskset(ident, **given)
    )
    Path("result.json").write_text(json.dumps({"score": score}))
