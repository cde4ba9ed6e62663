"""slime's `--custom-advantage-function-path`: computes advantages and returns from rollout data and
the turn table.

`advantage.patch.install` sets this path in the processes of the actor and of the critic. Before a
process builds its model, it also notes in `args` which of the two the process trains. Afterwards
slime whitens the advantages, and the value loss gives first tokens more weight; neither changes the
returns.

The reward of each trained token is -kl_coef x KL. slime's critic has no log-probs, so its KL is 0,
and KL never enters the value targets.
"""

import logging
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.exchange import Exchange, Layout, current_layout, link_turns, relayed, turn_flags
from advantage.gae import (
    Links,
    discounts_of,
    edges_of,
    links_of,
    solve_inside,
    solve_links,
)
from advantage.hl_gauss import hl_gauss_of
from advantage.notes import compare_notes
from advantage.packing import (
    LocalTokens,
    PackedTurns,
    check_first_tokens,
    local_tokens,
    pack_turns,
    per_token,
)
from advantage.settings import KL_SPLIT, ROLE, AdvantageSettings, advantage_settings
from advantage.stretches import cut_at_notes, stretch_columns
from advantage.turn_table import STALENESS, TurnColumns, read_turn_table
from advantage.values import METRICS_KEY, compare_values

logger = logging.getLogger(__name__)


def compute_advantages(args: Any, rollout_data: MutableMapping[str, Any]) -> None:
    """Write `advantages` and `returns` into `rollout_data`: one row per sample, shaped and typed
    like `values`.

    Rows are 0 on untrained tokens; on trained tokens, returns = advantages + values. With
    `gae_form: turn`, each token has its turn's advantage and return; `compaction` shrinks
    advantages, not returns. The last reader removes the turn table. With `policy_loss: dis`, the
    actor's data also gets the staleness of each token.

    Args:
        args: slime's arguments. `AdvantageSettings` has the YAML's keys. The hook also reads
            `kl_coef`, this process's role, and from `rollout_data_postprocess_path` whether the KL
            split needs the table.
        rollout_data: for S samples whose responses have R_s tokens:
            `values` and `kl`: S rows of this context-parallel rank's part of the R_s tokens,
                floating; `kl` in nats.
            `loss_masks`: S rows [R_s], 1 on trained tokens, complete on every context-parallel
                rank.
            `response_lengths`, `total_lengths`: S integers, in tokens.
            `prompt`: S rows of the turn table (`advantage.turn_table.encode_row`).

    Raises:
        TurnTableError: the table is missing or foreign, or the turns of all ranks do not form
            episodes.
        ConfigError: a setting is out of range, or depends on the role of this process, which
            nothing has noted.
        ValueError: a value or KL is not finite, or a row has the wrong length.
        OtherRankError: another rank of this pipeline stage failed, so this rank stops too.
        RuntimeError: several processes run without Megatron's process groups.

    Example: one turn of two tokens that ended its episode with reward 1.

        row = TurnRow(segment=0, first_turn=0, terminated=True, turns=(TurnSpan(0, 2, reward=1.0),))
        rollout_data = {
            "values": [torch.tensor([0.5, 0.75])],
            "kl": [torch.zeros(2)],
            "loss_masks": [torch.ones(2)],
            "response_lengths": [2],
            "total_lengths": [5],
            "prompt": [encode_row(row)],
        }
        compute_advantages(Namespace(), rollout_data)
        rollout_data["advantages"]  # [tensor([0.5000, 0.2500])]
    """
    layout = current_layout()
    if not layout.last_stage:
        # The KL split, which slime calls here too, removes the table; slime logs nothing here.
        return
    began = time.perf_counter()
    with relayed(layout.stage), Exchange(layout.data) as exchange:
        _compute(args, rollout_data, layout, exchange)
    samples = len(rollout_data["response_lengths"])
    took_ms = 1e3 * (time.perf_counter() - began)
    logger.info(
        "advantages of %d samples in %.1f ms; %d data-parallel ranks",
        samples,
        took_ms,
        layout.data.size,
    )


@torch.no_grad()
def _compute(
    args: Any, rollout_data: MutableMapping[str, Any], layout: Layout, exchange: Exchange
) -> None:
    """Compute on flat vectors: [R] for the response tokens of this rank's samples laid end to end.

    Nothing between the two sums over context-parallel ranks may fail on one rank alone.
    """
    with relayed(layout.context):
        settings = advantage_settings(args)
        role = getattr(args, ROLE, None)
        batch = _read(args, rollout_data, settings, layout)
        if settings.policy_loss == "dis" and role == "actor":
            rollout_data[STALENESS] = batch.staleness()
    # Fill in the tokens of other context-parallel ranks.
    layout.context.all_reduce(batch.values)
    if batch.rewards is not None:
        layout.context.all_reduce(batch.rewards)
    values, rewards = batch.pack()

    # Inside turns.
    turns = batch.turns
    form = settings.gae_form
    discounts = discounts_of(settings, role, turns.lengths)
    inside = solve_inside(values, rewards, turns.lengths, turns.rewards, discounts, form)
    edges = edges_of(turns.moves, discounts, form)
    links = links_of(inside, turns.lengths, turns.rewards, turns.bootstrap, edges)

    # Between turns, over all ranks.
    columns = batch.columns
    device = values.device
    endings = turn_flags(columns, turns.trained)
    labels = [column.to(device).double() for column in (columns.segment, columns.index, endings)]
    more = stretch_columns(turns, inside, discounts) if form == "compaction" else ()
    table, mine = exchange.rows(torch.stack([*labels, *links, *more], 1))
    segment, index, flags, v, w, a, p, q, *more = table.unbind(1)
    following = link_turns(segment, index, flags.long())
    links = Links(v, w, a, p, q)
    stretches = cut_at_notes(following, flags.long(), links, *more) if more else None
    if stretches is not None:
        following = stretches.following
        links = stretches.links
    next_value, next_advantage = solve_links(links, following)

    # Every token.
    carry = edges.carry(next_value[mine], next_advantage[mine])
    if stretches is None:
        advantages, returns = inside.finish(carry)
    else:
        advantages, returns = stretches.finish(inside, carry, mine, turns.lengths)
    rollout_data["advantages"] = batch.unpack(advantages)
    rollout_data["returns"] = batch.unpack(returns)
    if role == "critic":
        own = links.solved(next_value, next_advantage)
        rollout_data[METRICS_KEY] = compare_values(flags.long(), index, *own, hl_gauss_of(settings))
    else:
        notes = compare_notes(flags.long(), following, next_advantage)
        rollout_data.update({name: value.float() for name, value in notes.items()})


@dataclass(frozen=True)
class _Batch:
    """This rank's samples, and the flat vectors of its response tokens [R]; those of other ranks'
    tokens are 0."""

    columns: TurnColumns
    local: LocalTokens
    turns: PackedTurns
    values: Tensor
    rewards: Tensor | None
    """-kl_coef x KL; None without KL in the reward."""

    def staleness(self) -> list[Tensor]:
        """The staleness of each token, one row per sample."""
        staleness = per_token(
            self.columns.staleness, self.columns, self.local.lengths, otherwise=-1.0
        )
        return self.local.split(staleness.to(self.values.device))

    def pack(self) -> tuple[Tensor, Tensor | None]:
        """Pick the values and rewards of the turns' tokens [N]; raises ValueError if one is not
        finite."""
        lengths = self.local.lengths
        values = self.turns.take(self.values)
        self.turns.check_finite("the value", values, lengths)
        if self.rewards is None:
            return values, None
        rewards = self.turns.take(self.rewards).index_fill_(0, self.turns.untrained, 0)
        self.turns.check_finite("-kl_coef x KL", rewards, lengths)
        return values, rewards

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Cut [N] into one row per sample, which is 0 on untrained tokens."""
        trained = packed.index_fill_(0, self.turns.untrained, 0)
        return self.local.split(self.turns.put(trained))


def _read(
    args: Any, rollout_data: MutableMapping[str, Any], settings: AdvantageSettings, layout: Layout
) -> _Batch:
    split_follows = getattr(args, "rollout_data_postprocess_path", None) == KL_SPLIT
    kl_coef = getattr(args, "kl_coef", 0.0)
    columns = read_turn_table(
        rollout_data, keep=split_follows or settings.value_pretraining.batches > 0
    )
    if rollout_data.get("values") is None:
        raise TurnTableError(
            "rollout_data has no values, and GAE needs a critic: give --advantage-estimator ppo"
        )
    local = local_tokens(rollout_data, layout)
    values = local.join(rollout_data["values"])
    rewards = local.join(rollout_data["kl"]).mul_(-kl_coef) if kl_coef else None
    turns = pack_turns(columns, rollout_data["loss_masks"], local.lengths)
    if settings.value_first_token_weight != 1.0:
        check_first_tokens(turns, local.lengths)
    return _Batch(columns, local, turns, values, rewards)
