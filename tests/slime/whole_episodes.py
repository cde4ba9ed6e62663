"""Batches of whole episodes through slime's own data path (`python -m tests.slime.whole_episodes`).

`rollout.generate.generate` plays the episodes as slime's own loop asks for them; slime's
RolloutManager flattens, logs, converts and splits them, and its trainer's logger adds them up.
slime is the one on PYTHONPATH.
"""

import asyncio
import importlib
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch as mock_patch

from tests.fixtures.inside_slime import installed, log, megatron, report, start
from tests.fixtures.rollout_args import COUNTING
from tests.slime.data_path import Played, serve

EPISODES = 8
LOGGING = {
    "custom_rollout_log_function_path": "inspection.metrics.log_rollout",
    "log_reward_category": None,
    "rollout_num_gpus": 1,
    "wandb_always_use_train_step": False,
    "use_wandb": False,
    "use_tensorboard": False,
    "rollout_data_postprocess_path": "advantage.kl_split.log_kl_split",
    "log_multi_turn": True,
    "use_mlflow": False,
    "dynamic_sampling_filter_path": None,
}


class Episodes(Played):
    """A batch of whole episodes of the counting game."""

    def __init__(self, port: int, history: str, env: dict[str, Any], **changes: Any) -> None:
        settings = {
            "rollout_interaction_env_path": COUNTING,
            "history": history,
            **LOGGING,
            **changes,
        }
        memory = {"memory": {"kind": "full"}} if history == "full" else {}
        env = {"max_length": 6, **env}
        sizes = {
            "rollout_batch_size": EPISODES,
            "global_batch_size": EPISODES,
            "turn_quota": "global",
        }
        super().__init__(Path(tempfile.mkdtemp()), port, env=env, **sizes, **memory, **settings)

    def play(self, args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
        from rollout.bridge.flags import RolloutFlags
        from rollout.bridge.framework import RolloutFnTrainOutput, run
        from rollout.generate import generate

        groups = source.get_samples(EPISODES)

        async def play() -> list[Any]:
            params = RolloutFlags.read(args).sampling_params()
            return await asyncio.gather(*(generate(args, sample, params) for (sample,) in groups))

        return RolloutFnTrainOutput(samples=[[episode] for episode in run(play())], metrics={})

    def train_on_it(self) -> dict[str, Any]:
        """What the trainer's logger says after this batch went all the way."""
        from advantage.kl_split import log_kl_split

        rank = self.on_the_rank()
        with installed(self.args):
            megatron("loss").compute_advantages_and_returns(self.args, rank)
            log_kl_split(self.args, 0, rank)
        rank.setdefault("global_batch_sizes", [EPISODES])
        return log(self.args, rank)

    def log_rollout(self) -> dict[str, Any]:
        """What slime's rollout logger says of the samples."""
        from inspection.metrics import log_rollout

        caught: dict[str, Any] = {}
        with mock_patch.object(trackers(), "log", lambda args, data, step_key: caught.update(data)):
            assert log_rollout(0, self.args, self.samples, {}, 1.0)
        return caught


def trackers() -> Any:
    """The module to which slime's rollout logger hands its numbers."""
    try:
        return importlib.import_module("slime.observability.logging_utils")
    except ModuleNotFoundError:
        return importlib.import_module("slime.ray.rollout").logging_utils


BREAKS = {"raise_at": 0, "raise_seeds": [0, 3]}
"""Environments that break; the first episode of the batch is among them."""
CASES = (
    ("window", BREAKS, 2),
    ("full", BREAKS, 2),
    ("full", {"time_limit": 3}, 0),
    ("full", {"time_limit": 3, **BREAKS}, 2),
    ("window", {"raise_at": 0}, EPISODES),
)
"""What an episode is a sample of, the environment's options, and the number of episodes that
fail."""


def whole_truncated_and_failed_episodes_reach_the_trainers_logger(port: int) -> None:
    from rollout.bridge.sample import row_of

    for history, env, failed in CASES:
        batch = Episodes(port, history, env, bootstrap_on_time_limit="time_limit" in env)
        assert [sample.status.value for sample in batch.samples].count("failed") == failed
        if not failed:  # the state after a time limit is the end of the episode's sample
            assert 0 < sum(row_of(sample).bootstrap >= 0 for sample in batch.samples) < EPISODES
        data = batch.call("_convert_samples_to_train_data", batch.samples)
        for key in (
            "round_number",
            "rewards",
            "raw_reward",
            "truncated",
            "sample_indices",
            "response_lengths",
        ):
            assert all(isinstance(value, int | float) for value in data[key]), (key, data[key])
        assert all(isinstance(name, str) for name in data["source_names"])
        assert batch.log_rollout()
        logged = batch.train_on_it()
        assert {"advantages", "round_number"} <= logged.keys() and "prompt" not in logged
        has_kl = bool({"kl_action", "kl_reasoning"} & logged.keys())
        assert has_kl == (failed < EPISODES), sorted(logged)


def failed_episodes_under_slimes_own_converter(port: int) -> None:
    """Without our converter nothing computes from the turn table, as with a group estimator of
    slime's."""
    batch = Episodes(port, "full", BREAKS)
    args = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
    }
    batch.manager.args = Namespace(**{**vars(batch.args), **args})
    batch.manager.custom_convert_samples_to_train_data_func = None
    batch.manager.custom_reward_post_process_func = None
    batch.manager._post_process_rewards = lambda samples: batch.call(
        "_post_process_rewards", samples
    )
    assert len(batch.on_the_rank()["round_number"]) == EPISODES


CHECKS = [
    whole_truncated_and_failed_episodes_reach_the_trainers_logger,
    failed_episodes_under_slimes_own_converter,
]


if __name__ == "__main__":
    start()
    report(CHECKS, serve())
