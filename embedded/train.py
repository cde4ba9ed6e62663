"""The training loop: slime's order of calls, through the same hooks, with the engine in a process
beside this one.

The rollout's event loop runs in a thread here, so continuous batches are played while the trainer
works.
"""

import time
from argparse import Namespace
from collections.abc import Container, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any, Protocol

import torch
from tqdm import tqdm

from advantage.settings import advantage_settings
from embedded.arguments import EmbeddedFlags, embedded_flags
from embedded.engine.decoder import Weights
from embedded.engine.engine import EngineOptions
from embedded.engine.process import EngineProcess
from embedded.run.record import TrainingRecord
from embedded.trainer.ppo import PpoTrainer
from envs.loading import load_attribute
from rollout.bridge.framework import run
from rollout.bridge.settings import load_settings
from rollout.checkpoint import checkpoint_path
from rollout.play.runtime import close_runtimes

Record = TrainingRecord | None


class Tracker(Protocol):
    """Receives the results of a run."""

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Record an update; called after each."""

    def evaluation(self, rollout_id: int, result: Any, weights: Weights) -> object:
        """Record an evaluation; called after each. `rollout_id` updates came before it.

        `weights` are the evaluated policy's under Hugging Face names; the next update changes them
        in place.
        """


def train(
    args: Namespace, tracker: Tracker, evaluated: Container[int] = (), record: Record = None
) -> None:
    """Evaluate, train `num_rollout` updates and evaluate again; `eval_interval` adds evaluations in
    between.

    A run that is killed continues with `load` where its last checkpoint was saved, and repeats what
    came after it.

    Args:
        args: slime's, as `make_args` builds it. The engine's address and the first update are set
            on it, as slime does.
        evaluated: numbers of updates after which a resumed run has been evaluated already.
        record: receives each batch with the trainer's numbers.

    Raises ConfigError if flags, YAML or checkpoint do not fit together, and what the rollout
    function raises.
    """
    flags = embedded_flags(args)
    on_update = advantage_settings(args).on_update
    generate = _hook(flags, "rollout_function_path")
    evaluate = _hook(flags, "eval_function_path") if flags.eval_function_path else generate
    source_class = _hook(flags, "data_source_path")
    convert = _hook(flags, "custom_convert_samples_to_train_data_path")
    with (
        EngineProcess(_engine_options(flags, load_settings(args).n_env)) as engine,
        ExitStack() as at_end,
    ):
        at_end.callback(lambda: run(close_runtimes()))
        # The engine loads its model meanwhile.
        source = source_class(args)
        trainer = PpoTrainer(args)
        args.sglang_router_ip = engine.host
        args.sglang_router_port = engine.port
        if flags.load:
            args.start_rollout_id = trainer.load(flags.load) + 1
            source.load(args.start_rollout_id - 1)
        versions = count(1)
        engine.update_weights(trainer.policy_state(), str(next(versions)))

        def evaluate_if_due(updates: int) -> None:
            if _evaluates_after(flags, updates) and updates not in evaluated:
                result = evaluate(args, max(updates - 1, 0), source, evaluation=True)
                tracker.evaluation(updates, result, trainer.policy_state())

        evaluate_if_due(args.start_rollout_id)
        left = range(args.start_rollout_id, flags.num_rollout)
        for rollout_id in tqdm(
            left, desc="training", unit="update", dynamic_ncols=True, disable=None
        ):
            began = _clocks(engine)
            output = generate(args, rollout_id, source)
            played = time.perf_counter()
            metrics = trainer.train(rollout_id, convert(args, output.samples))
            engine.update_weights(trainer.policy_state(), str(next(versions)), on_update)
            times = _times(began, played, _clocks(engine))
            tracker.update(rollout_id, {**(output.metrics or {}), **metrics, **times})
            if record is not None and trainer.trained is not None:
                record.add(rollout_id, output.samples, *trainer.trained)
            updates = rollout_id + 1
            if flags.save and _saves_after(flags, updates):
                _save(flags.save, rollout_id, source, trainer)
            evaluate_if_due(updates)


def _hook(flags: EmbeddedFlags, name: str) -> Any:
    return load_attribute(getattr(flags, name), name)


def _engine_options(flags: EmbeddedFlags, n_env: int) -> EngineOptions:
    return EngineOptions(
        model_path=flags.hf_checkpoint,
        # More rows than episodes would only make each decode step dearer.
        max_running_requests=min(flags.sglang_server_concurrency, n_env),
        context_length=flags.rollout_max_context_len,
        device="cuda" if torch.cuda.is_available() else "cpu",
        bf16=flags.bf16,
        seed=flags.rollout_seed,
    )


def _clocks(engine: EngineProcess) -> tuple[float, float, float]:
    """Read wall time, and the CPU time of this process and of the engine's, in seconds."""
    return time.perf_counter(), time.process_time(), engine.cpu_s()


def _times(began: tuple[float, ...], played: float, ended: tuple[float, ...]) -> dict[str, float]:
    """Name the seconds between two readings of `_clocks`; the batch was complete at `played`."""
    return {
        "perf/rollout_s": played - began[0],
        "perf/train_s": ended[0] - played,
        "perf/trainer_cpu_s": ended[1] - began[1],
        "perf/engine_cpu_s": ended[2] - began[2],
    }


def _save(folder: str, rollout_id: int, source: Any, trainer: PpoTrainer) -> None:
    """Save episodes and trainer, and delete the episodes of earlier checkpoints."""
    source.save(rollout_id)
    trainer.save(folder, rollout_id)  # last: a checkpoint counts once the trainer's is there
    state = checkpoint_path(folder, rollout_id)
    for old in set(state.parent.glob(f"*{state.suffix}")) - {state}:
        old.unlink()


def _evaluates_after(flags: EmbeddedFlags, updates: int) -> bool:
    return updates in (0, flags.num_rollout) or _due(flags.eval_interval, updates)


def _saves_after(flags: EmbeddedFlags, updates: int) -> bool:
    """At intervals, before each evaluation (so that a resumed run keeps it and the policy that it
    found best), and at the end."""
    if flags.save_interval is None:
        return updates == flags.num_rollout
    return _due(flags.save_interval, updates) or _evaluates_after(flags, updates)


def _due(interval: int | None, updates: int) -> bool:
    return interval is not None and updates % interval == 0
