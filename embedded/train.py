"""The training loop: slime's order of calls, through the same hooks, with engine and trainer in this process."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from tqdm import tqdm

from embedded.engine.engine import EngineOptions
from embedded.engine.server import EngineServer
from embedded.trainer.ppo import PpoTrainer
from envs.loading import load_attribute
from rollout.bridge.framework import run
from rollout.play.runtime import close_runtimes


class Tracker(Protocol):
    """Who wants to know how a run goes."""

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """One update is done."""

    def evaluation(self, rollout_id: int, result: Any) -> None:
        """The held-out episodes were played; `rollout_id` updates came before."""


def train(args: Namespace, tracker: Tracker) -> None:
    """Evaluate, train `num_rollout` updates, evaluate; `eval_interval` evaluates in between too.

    Raises:
        ConfigError: flags, YAML or checkpoint cannot work together.
        EngineError, FailureBudgetError: as the rollout function raises them.
    """
    generate, convert, source_of = (
        load_attribute(getattr(args, name), name)
        for name in ("rollout_function_path", "custom_convert_samples_to_train_data_path", "data_source_path")
    )
    evaluate = load_attribute(args.eval_function_path or args.rollout_function_path, "eval_function_path")
    options = EngineOptions(
        model_path=args.hf_checkpoint,
        max_running_requests=args.sglang_server_concurrency,
        context_length=args.rollout_max_context_len,
        device="cuda" if torch.cuda.is_available() else "cpu",
        seed=args.rollout_seed,
    )
    with EngineServer(options) as server, _open_connections():
        args.sglang_router_ip, args.sglang_router_port = server.host, server.port
        source, trainer = source_of(args), PpoTrainer(args)
        if args.load:
            args.start_rollout_id = trainer.load(args.load) + 1
            source.load(args.start_rollout_id - 1)
        server.update_weights(trainer.policy_state(), str(args.start_rollout_id))
        if args.start_rollout_id == 0:
            tracker.evaluation(0, evaluate(args, 0, source, evaluation=True))
        updates = range(args.start_rollout_id, args.num_rollout)
        for rollout_id in tqdm(updates, desc="training", unit="update", dynamic_ncols=True):
            began = time.perf_counter()
            output = generate(args, rollout_id, source)
            rolled = time.perf_counter()
            metrics = trainer.train(rollout_id, convert(args, output.samples))
            server.update_weights(trainer.policy_state(), str(rollout_id + 1))
            times = {"perf/rollout_s": rolled - began, "perf/train_s": time.perf_counter() - rolled}
            tracker.update(rollout_id, {**(output.metrics or {}), **metrics, **times})
            last = rollout_id + 1 == args.num_rollout
            if args.save and (last or _due(args.save_interval, rollout_id)):
                trainer.save(args.save, rollout_id)
                source.save(rollout_id)
            if last or _due(args.eval_interval, rollout_id):
                tracker.evaluation(rollout_id + 1, evaluate(args, rollout_id, source, evaluation=True))


@contextmanager
def _open_connections() -> Iterator[None]:
    """Close the rollout's connections and environment workers at the end, whatever the end."""
    try:
        yield
    finally:
        run(close_runtimes())


def _due(interval: int | None, rollout_id: int) -> bool:
    return bool(interval) and (rollout_id + 1) % interval == 0
