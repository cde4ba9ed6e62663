"""The rollout inside slime's types and data path (`python -m tests.slime.data_path`, with slime on
PYTHONPATH).

No cluster, no training step. Turns are played on a scripted engine, handed to slime's own
RolloutManager methods, split, and given to slime's own advantage function with the patch installed.
"""

import asyncio
import base64
import importlib
import tempfile
import threading
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch as mock_patch

import torch

from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.inside_slime import installed, megatron, report, slime_args, start
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine, draw
from tests.slime.cpu.ledger_env import read_ledger

TURNS, STEP = 24, 8
WORDS = ("wait for it", "go on", "and on")


class Played:
    """One fixed-turn batch and where it came from."""

    def __init__(self, folder: Path, port: int, **changes: Any) -> None:
        from rollout.data_source import EpisodeSource
        from rollout.samples import convert_samples_to_train_data

        self.folder, self.port = folder, port
        settings = {
            "rollout_interaction_env_path": "tests.slime.cpu.ledger_env",
            "env": {"ledger": str(folder / "ledger"), "longest": 9},
            "turn_quota": "per_env",
            "rollout_batch_size": TURNS,
            "global_batch_size": STEP,
            "partial_rollout": False,
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": 1,
            "load_debug_rollout_data": None,
            "disable_rollout_trim_samples": False,
            "use_dynamic_global_batch_size": False,
            "reward_key": None,
            "sglang_speculative_algorithm": None,
            "eval": {"episodes": 3},
            "use_rollout_routing_replay": False,
            **changes,
        }
        self.args = Namespace(
            **{**vars(slime_args()), **vars(rollout_args(folder, port)), **settings}
        )
        self.source = EpisodeSource(self.args)
        self.manager = Namespace(
            args=self.args,
            data_source=self.source,
            generate_rollout=self.play,
            custom_convert_samples_to_train_data_func=convert_samples_to_train_data,
            use_experimental_refactor=False,
            train_parallel_config=dict(
                dp_size=1, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1
            ),
        )
        self.samples, self.metrics = self.call("_get_rollout_data", 0)

    def play(self, args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
        """The rollout function."""
        from rollout.fixed_turn import generate_rollout

        return generate_rollout(args, rollout_id, source, evaluation)

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of slime's own RolloutManager, on this batch."""
        rollout = importlib.import_module("slime.ray.rollout")
        function = getattr(rollout.RolloutManager.__ray_metadata__.modified_class, method)
        with mock_patch.object(rollout.ray, "put", lambda x, **_: x):
            return function(self.manager, *arguments)

    def on_the_rank(self) -> dict[str, Any]:
        """What the one data-parallel rank receives, as its training process prepares it."""
        data = self.call("_convert_samples_to_train_data", self.samples)
        (box,) = self.call("_split_train_data_by_dp", data)
        rank = dict(box.inner)
        rank["total_lengths"] = [rank["total_lengths"][i] for i in rank["partition"]]
        for name, dtype in (("loss_masks", None), ("rollout_log_probs", torch.float32)):
            rank[name] = [torch.as_tensor(row, dtype=dtype) for row in rank[name]]
        rank["rollout_mask_sums"] = torch.as_tensor(rank["rollout_mask_sums"], dtype=torch.float32)
        for name in ("values", "ref_log_probs", "log_probs"):
            rank[name] = [torch.randn(n) for n in rank["response_lengths"]]
        return rank


def both_roles_train_on_what_the_environments_paid(played: Played) -> None:
    from tests.slime.expectation import assert_as_paid, payments_of, trained_samples

    override = importlib.import_module("slime.utils.arguments")._apply_megatron_role_overrides
    kinds = [s.metadata["kind"] for s in played.samples]
    assert kinds.count("turn") == TURNS and "bootstrap" in kinds
    for role in ("actor", "critic"):
        rank = played.on_the_rank()
        assert rank["global_batch_sizes"] == [STEP] * (TURNS // STEP)
        args = override(played.args, {"custom_megatron_init_path": "advantage.patch.install"}, role)
        assert role == "actor" or args.custom_advantage_function_path is None, (
            "slime drops the critic's flag"
        )
        with installed(args):
            megatron("loss").compute_advantages_and_returns(args, rank)
        assert "prompt" not in rank, "slime's logger would sum it up"
        items = trained_samples([{"data": rank}], [s.to_dict() for s in played.samples])
        assert len(items) == len(played.samples)
        assert_as_paid(
            items,
            payments_of(items, read_ledger(played.folder / "ledger"), chatml_tokenizer()),
            kl_coef=args.kl_coef,
        )


def samples_keep_slimes_own_bookkeeping(played: Played) -> None:
    turns = [s for s in played.samples if s.metadata["kind"] == "turn"]
    assert all(s.weight_versions == ["1"] for s in turns)
    assert all(
        s.prefix_cache_info.total_prompt_tokens == len(s.tokens) - s.response_length for s in turns
    )
    assert all(s.status == type(s).Status.COMPLETED for s in turns)
    assert len({s.session_id for s in turns}) == len({s.metadata["episode_id"] for s in turns})


def what_training_replays_reaches_the_rank(played: Played) -> None:
    """Routed experts of every token, the tokens that top-p kept, and what speculation cost; see
    `replayable`."""
    replay = Played(Path(tempfile.mkdtemp()), played.port, **REPLAY)
    rank = replay.on_the_rank()
    for i, position in enumerate(rank["partition"]):
        sample = replay.samples[position]
        experts, tokens = torch.as_tensor(rank["rollout_routed_experts"][i]), list(sample.tokens)
        if sample.metadata["kind"] != "turn":
            assert experts.shape == (len(tokens) - 1, 2, 3) and len(experts.unique()) == 3
            continue
        assert torch.equal(experts, experts_of(tokens))
        assert (
            sample.spec_info.spec_accept_token_num == 3
            and sample.spec_info.spec_draft_token_num == 4
        )
        kept, offsets = rank["rollout_top_p_token_ids"][i], rank["rollout_top_p_token_offsets"][i]
        assert list(kept) == [k for t in tokens[-sample.response_length :] for k in (t, t + 1)]
        assert list(offsets) == list(range(0, 2 * sample.response_length + 1, 2))


def whole_episodes_keep_what_training_replays(played: Played) -> None:
    """Many turns in one sample: observations between them were routed too, and no token of them was
    drawn."""
    from rollout.bridge.flags import RolloutFlags
    from rollout.bridge.framework import run
    from rollout.bridge.sample import row_of
    from rollout.generate import generate

    changes = {**REPLAY, "history": "full", "memory": {"kind": "full"}}
    replay = Played(Path(tempfile.mkdtemp()), played.port, **changes)
    (given,) = replay.source.get_samples(1)[0]
    sample = run(generate(replay.args, given, RolloutFlags.read(replay.args).sampling_params()))
    turns = len(row_of(sample).turns)
    assert turns > 1 and sample.spec_info.spec_accept_token_num == 3 * turns
    assert torch.equal(torch.as_tensor(sample.rollout_routed_experts), experts_of(sample.tokens))
    counts = torch.as_tensor(sample.rollout_top_p_token_offsets).diff().tolist()
    assert counts == [2 * trained for trained in sample.loss_mask]


CHECKS = [
    both_roles_train_on_what_the_environments_paid,
    samples_keep_slimes_own_bookkeeping,
    what_training_replays_reaches_the_rank,
    whole_episodes_keep_what_training_replays,
]


REPLAY = {
    "use_rollout_routing_replay": True,
    "num_layers": 2,
    "moe_router_topk": 3,
    "num_experts": 64,
    "sglang_speculative_algorithm": "EAGLE",
    "rollout_top_p": 0.9,
}


def experts_of(tokens: Sequence[int]) -> torch.Tensor:
    """The experts that the scripted engine routes each token but the last to: [tokens - 1, layers,
    k]."""
    spread = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    return torch.tensor(tokens[:-1], dtype=torch.int32)[:, None, None] % 50 + spread


def replayable(engine: ScriptedEngine, text: str, body: dict[str, Any]) -> dict[str, Any]:
    """An answer as SGLang gives it to requests that ask for routing or top-p's tokens."""
    answer = engine.answer(text, body)
    meta = answer["meta_info"]
    drawn = [token for _, token, _ in meta["output_token_logprobs"]]
    encode = lambda x: base64.b64encode(x.to(torch.int32).numpy().tobytes()).decode()
    if body.get("return_routed_experts"):
        meta["routed_experts"] = encode(experts_of([*body["input_ids"], *drawn]))
        meta |= {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 1}
    if (body["sampling_params"].get("custom_params") or {}).get("return_top_p_token_ids"):
        meta["top_p_token_ids"] = encode(torch.tensor([k for t in drawn for k in (t, t + 1)]))
        meta["top_p_token_offsets"] = encode(torch.arange(len(drawn) + 1) * 2)
    return answer


def serve() -> int:
    """Start the scripted engine on a loop of its own; return its port."""
    engine = ScriptedEngine(
        chatml_tokenizer(), lambda body, _: replayable(engine, WORDS[draw(body, len(WORDS))], body)
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
    return engine.port


if __name__ == "__main__":
    start()
    report(CHECKS, Played(Path(tempfile.mkdtemp()), serve()))
