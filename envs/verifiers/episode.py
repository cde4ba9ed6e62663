"""Plays one episode of a verifiers environment: the program that `envs.verifiers` starts, once per episode.

It runs in verifiers' own Python and imports nothing of slime-verlog. It reads `episode.json` and writes `result.json`.
"""

import asyncio
import importlib
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

OF_THE_MODEL = ("EmptyModelResponseError", "InvalidModelResponseError", "ToolCallError", "ToolParseError")
"""Errors that the model's response caused; the episode is scored with them."""


def play_environment(episode: dict[str, Any], name: str) -> float:
    """Play a row of an environment that the module's `load_environment` makes (verifiers before 0.4)."""
    import verifiers as vf
    from verifiers.types import ClientConfig

    env = vf.load_environment(name, **episode["args"])
    rows = env.get_dataset() if episode["split"] == "train" else env.get_eval_dataset()
    row = rows[episode["seed"] % min(len(rows), episode["examples"] or len(rows))]
    client = ClientConfig(api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"])
    output = asyncio.run(env.run_rollout(row, client, os.environ["AGENT_MODEL"], {}))
    error = output.get("error")
    if error and error["error"] not in OF_THE_MODEL:
        sys.exit(f"the rollout failed: {error['error_chain_str']}")
    return output["reward"]


def play_taskset(episode: dict[str, Any]) -> float:
    """Play a task of a taskset (verifiers from 0.4); its score is the mean of the trained agents' rewards."""
    import verifiers.v1 as vf

    args = dict(episode["args"])
    args["taskset"] = {"id": episode["id"], **args.get("taskset", {})}
    env = vf.load_environment(vf.resolve_env_config(args))
    count = episode["examples"]
    if count is None and env.taskset.bounded:
        count = sum(1 for _ in env.taskset)
    if not count:
        sys.exit(f"the taskset {episode['id']} has no end; set env.examples")
    task = next(itertools.islice(env.taskset, episode["seed"] % count, None))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(client=client, model=os.environ["AGENT_MODEL"], sampling=vf.SamplingConfig())

    async def play() -> vf.Episode:
        async with env.serving():
            return await env.run_episode(task, context)

    played = asyncio.run(play())
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if errors:
        sys.exit(f"the rollout failed: {errors[0].type}: {errors[0].message}")
    rewards = [trace.reward for trace in played.traces if trace.agent.trainable]
    return sum(rewards) / len(rewards)


def main() -> None:
    """Play the episode and write its score."""
    episode = json.loads(Path("episode.json").read_text())
    name = episode["id"].rsplit("/", 1)[-1].replace("-", "_")
    is_classic = importlib.util.find_spec(name) and hasattr(importlib.import_module(name), "load_environment")
    score = play_environment(episode, name) if is_classic else play_taskset(episode)
    Path("result.json").write_text(json.dumps({"score": score}))


if __name__ == "__main__":
    main()
