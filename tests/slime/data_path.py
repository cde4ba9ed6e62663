"""The rollout inside a real framework's types and data path (`python -m tests.slime.data_path slime`).

The framework is the one on PYTHONPATH; no cluster, no training step. Turns are played on a scripted engine, handed to
the framework's own RolloutManager methods, split, and given to its own advantage function with the patch installed.
Prints one JSON object: check to null, or to what went wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch as mock_patch

import torch

from tests.advantage.in_framework import NAME, framework_args, installed, loss_module, module, start
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine, draw
from tests.fixtures.stand_ins import allow_absent_packages

TURNS, STEP = 24, 8
WORDS = ("wait for it", "go on", "and on")


class Played:
    """One fixed-turn batch and where it came from."""

    def __init__(self, folder: Path, port: int) -> None:
        from rollout.data_source import EpisodeSource
        from rollout.fixed_turn import generate_rollout
        from rollout.samples import convert_samples_to_train_data

        self.folder = folder
        settings = {
            "rollout_interaction_env_path": "tests.slime.cpu.ledger_env",
            "env": {"ledger": str(folder / "ledger"), "longest": 9},
            "turn_quota": "per_env",
            **{"rollout_batch_size": TURNS, "global_batch_size": STEP, "partial_rollout": False},
            **{"load_debug_rollout_data": None, "disable_rollout_trim_samples": False},
            **{"use_dynamic_global_batch_size": False, "reward_key": None, "sglang_speculative_algorithm": None},
            **{"eval": {"episodes": 3}, "use_rollout_routing_replay": False},
        }
        self.args = Namespace(**{**vars(framework_args()), **vars(rollout_args(folder, port)), **settings})
        self.source = EpisodeSource(self.args)
        self.manager = Namespace(
            args=self.args,
            data_source=self.source,
            generate_rollout=generate_rollout,
            custom_convert_samples_to_train_data_func=convert_samples_to_train_data,
            use_experimental_refactor=False,
            train_parallel_config=dict(dp_size=1, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1),
        )
        self.samples, self.metrics = self.call("_get_rollout_data", 0)

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the framework's own RolloutManager, on this batch."""
        rollout = module("ray.rollout")
        function = getattr(rollout.RolloutManager.__ray_metadata__.modified_class, method)
        with mock_patch.object(rollout.ray, "put", lambda x, **_: x):
            return function(self.manager, *arguments)

    def on_the_rank(self) -> dict[str, Any]:
        """What the one data-parallel rank receives, as its training process prepares it."""
        data = self.call("_convert_samples_to_train_data", self.samples)
        ranks = (1,) if NAME == "miles" else ()
        (box,) = self.call("_split_train_data_by_dp", data, *ranks)
        rank = dict(box.inner)
        rank["total_lengths"] = [rank["total_lengths"][i] for i in rank["partition"]]
        rank["loss_masks"] = [torch.as_tensor(mask) for mask in rank["loss_masks"]]
        for name in ("values", "ref_log_probs", "log_probs"):
            rank[name] = [torch.randn(n) for n in rank["response_lengths"]]
        return rank

    def payments(self) -> dict[Any, Any]:
        files = [file.read_text().splitlines() for file in (self.folder / "ledger").glob("*")]
        lines = [json.loads(line) for file in files for line in file]
        return {(line["seed"], line["turn"], line["text"]): line for line in lines}


def nothing_is_lost_on_the_way_to_a_rank(played: Played) -> None:
    kinds = [s.metadata["kind"] for s in played.samples]
    assert kinds.count("turn") == TURNS and "bootstrap" in kinds
    rank = played.on_the_rank()
    assert sorted(rank["partition"]) == list(range(len(played.samples)))
    assert len(rank["prompt"]) == len(played.samples)
    if NAME == "miles":
        assert len(played.samples) % STEP == 0, "miles would cut the rest off"
    else:
        assert rank["global_batch_sizes"] == [STEP] * (TURNS // STEP)


def both_roles_train_on_what_the_environments_paid(played: Played) -> None:
    from tests.slime.expectation import (
        critic_targets,
        expected_advantages,
        largest_difference,
        payments_of,
        trained_samples,
    )

    for role in ("actor", "critic"):
        rank = played.on_the_rank()
        args = Namespace(**{**vars(played.args), "custom_megatron_init_path": "advantage.patch.install"})
        if role == "critic":
            args.kl_coef = 0.0
            if hasattr(args, "custom_advantage_function_path"):
                args.custom_advantage_function_path = None
        with installed(args):
            loss_module().compute_advantages_and_returns(args, rank)
        found = [s.to_dict() for s in played.samples]
        items = [item for item in trained_samples([{"data": rank}], found) if _kind(item) != "padding"]
        paid = payments_of(items, played.payments(), chatml_tokenizer())
        expected = expected_advantages(items, paid, args.kl_coef)
        assert largest_difference(items, "advantages", expected) < 2e-5
        assert largest_difference(items, "returns", critic_targets(items, expected)) < 2e-5


def _kind(item: Any) -> str:
    return item.sample["metadata"]["kind"]


def samples_keep_the_frameworks_own_bookkeeping(played: Played) -> None:
    turns = [s for s in played.samples if s.metadata["kind"] == "turn"]
    assert all(s.weight_versions == ["1"] for s in turns)
    assert all(s.prefix_cache_info.total_prompt_tokens == len(s.tokens) - s.response_length for s in turns)
    assert all(s.status == type(s).Status.COMPLETED for s in turns)
    assert len({s.session_id for s in turns}) == len({s.metadata["episode_id"] for s in turns})


def saved_samples_are_converted_alike(played: Played) -> None:
    """slime's debug modes write samples as dictionaries, and read them again."""
    fresh = played.call("_convert_samples_to_train_data", played.samples)
    again = [type(s).from_dict(s.to_dict()) for s in played.samples]
    loaded = played.call("_convert_samples_to_train_data", again)
    for key in fresh:
        assert len(fresh[key]) == len(loaded[key])
        pairs = zip(fresh[key], loaded[key], strict=True)
        same = [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs]
        assert all(same), key


def whole_episodes_satisfy_the_frameworks_contract(played: Played) -> None:
    from rollout.framework import run
    from rollout.generate import generate
    from rollout.runtime import sampling_params

    (sample,) = played.source.get_samples(1)[0]
    samples = run(generate(played.args, sample, sampling_params(played.args)))
    assert isinstance(samples, list)
    checks = module("observability.rollout_data_utils") if _has("observability.rollout_data_utils") else None
    validate = getattr(checks or module("ray.rollout"), "validate_rollout_id_annotated", None)
    if validate is not None:
        validate([[samples]])
    converted = played.call("_convert_samples_to_train_data", samples)
    assert len(converted["tokens"]) == len(samples)


def _has(path: str) -> bool:
    try:
        module(path)
    except ModuleNotFoundError:
        return False
    return True


def evaluation_comes_in_the_frameworks_format(played: Played) -> None:
    from rollout.fixed_turn import generate_rollout

    output = generate_rollout(played.args, 0, played.source, evaluation=True)
    assert type(output).__module__.startswith(NAME)
    (group,) = output.data.values()
    assert len(group["rewards"]) == len(group["samples"]) == 3


CHECKS = [
    nothing_is_lost_on_the_way_to_a_rank,
    both_roles_train_on_what_the_environments_paid,
    samples_keep_the_frameworks_own_bookkeeping,
    saved_samples_are_converted_alike,
    whole_episodes_satisfy_the_frameworks_contract,
    evaluation_comes_in_the_frameworks_format,
]


def serve() -> int:
    """Start the scripted engine on a loop of its own; return its port."""
    engine = ScriptedEngine(chatml_tokenizer(), lambda body, number: WORDS[draw(body, len(WORDS))])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
    return engine.port


def main() -> None:
    allow_absent_packages()
    start()
    played = Played(Path(tempfile.mkdtemp()), serve())
    results: dict[str, str | None] = {}
    for check in CHECKS:
        try:
            check(played)
            results[check.__name__] = None
        except Exception:
            results[check.__name__] = traceback.format_exc()
    print(json.dumps(results))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
