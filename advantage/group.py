"""slime's hook for training without a critic: finds the whole episodes of a batch, and compares
them in groups.

Episodes are compared by the returns of whole episodes, never by turn index: those that reach turn t
are a biased selection. Some estimators also compare turns with the same anchor, which is the
prompt. `advantage/estimators.py` has the formulas.
"""

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.estimators import ESTIMATORS, Episodes
from advantage.exchange import (
    BOOTSTRAP,
    ENDED,
    NOTES,
    Exchange,
    current_layout,
    in_turn_order,
    relayed,
    turn_flags,
)
from advantage.flags import GROUP, advantage_flags, check_kl
from advantage.gae import discounts_of, edges_of
from advantage.packing import local_tokens, pack_turns
from advantage.settings import KL_SPLIT, AdvantageSettings, advantage_settings
from advantage.turn_table import read_turn_table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupTurns:
    """Turns of many episodes, in any order; all [T]."""

    segment: Tensor
    index: Tensor
    flags: Tensor
    reward: Tensor
    group: Tensor
    anchor: Tensor
    trained: Tensor
    """Whether the turn has any trained token."""
    baseline: Tensor
    """Mean return of continuations from before the turn; 0 without any."""


def compute_advantages(args: Any, rollout_data: MutableMapping[str, Any]) -> None:
    """Write `advantages` and `returns` into `rollout_data`: each turn's advantage, on all its
    trained tokens.

    This is slime's `--custom-advantage-function-path` for estimators without a critic. Returns
    equal the advantages. `shared_state_ratio` is written for slime's log: the share of compared
    turns whose prompt another turn of the group had, too.

    Args:
        args: slime's arguments, with the YAML's keys `group_estimator`, `gamma_step`, `lambda_step`
            and `gigpo_…`.
        rollout_data: as for `advantage.hook.compute_advantages`, without `values`; rows are shaped
            and typed like `kl`.

    Raises:
        ConfigError: an unknown estimator, or KL in the reward, which these estimators do not
            support.
        TurnTableError: the table is missing or foreign, or turns are missing in an episode.
        OtherRankError: another rank of this pipeline stage failed, so this rank stops too.
    """
    from advantage.patch.steps import install_late  # the patch imports this folder

    layout = current_layout()
    install_late(advantage_settings(args))
    if not layout.last_stage:
        return
    with relayed(layout.stage), Exchange(layout.data) as exchange:
        settings = advantage_settings(args)
        flags = advantage_flags(args)
        check_kl(replace(flags, custom_advantage_function_path=GROUP))
        columns = read_turn_table(
            rollout_data, keep=flags.rollout_data_postprocess_path == KL_SPLIT
        )
        packed = pack_turns(columns, rollout_data["loss_masks"], rollout_data["response_lengths"])
        group = columns.group.masked_fill(columns.bootstrap, -1)
        if flags.n_samples_per_prompt == 1:  # no two episodes share a start
            group = torch.full_like(group, -1)
        trained = packed.trained.cpu()
        own = (
            columns.segment,
            columns.index,
            turn_flags(columns),
            columns.reward,
            group,
            columns.anchor,
            trained,
            columns.baseline,
        )
        table, mine = exchange.rows(torch.stack([column.double() for column in own], 1))
        turns = GroupTurns(*table.unbind(1))
        advantages, shared = group_advantages(
            turns, settings, normalize=flags.grpo_std_normalization
        )
        per_turn = advantages[mine].to(packed.trained.device) * packed.trained
        per_token = torch.repeat_interleave(per_turn, packed.lengths)
        rows = local_tokens(rollout_data, layout).split(packed.put(per_token))
        pairs = zip(rows, rollout_data["kl"], strict=True)
        rollout_data["advantages"] = [row.to(like.dtype) for row, like in pairs]
        rollout_data["returns"] = [row.clone() for row in rollout_data["advantages"]]
        rollout_data["shared_state_ratio"] = torch.tensor(shared)


def group_advantages(
    turns: GroupTurns, settings: AdvantageSettings, *, normalize: bool
) -> tuple[Tensor, float]:
    """Compute one advantage per turn, [T] float64, and the share of the compared turns whose state
    another was in.

    Advantages are 0 for bootstrap states and for episodes without a return, which nothing is
    compared with. `normalize` divides by standard deviations (not in RLOO). Raises TurnTableError,
    which names segment and turn, if a turn is missing in an episode or occurs twice.
    """
    result = torch.zeros(len(turns.flags), dtype=torch.float64)
    order = _compared(turns)
    _, episode = _unique(turns.segment[order])
    _, group = _unique(turns.group[order])
    flags = turns.flags[order].long()
    anchor = turns.anchor[order]
    # The number of a turn without an anchor, which no other turn has.
    own = -1.0 - torch.arange(len(order))
    prompt = torch.where(anchor >= 0, anchor, own)
    _, state = _unique(torch.stack([group.double(), prompt], 1))
    edges = edges_of(flags & NOTES == 0, discounts_of(settings, "actor"))
    episodes = Episodes(episode, group, state, turns.reward[order], edges, turns.baseline[order])
    result[order] = ESTIMATORS[settings.group_estimator or "grpo"](episodes, settings, normalize)
    return result, episodes.shared_states()


def _compared(turns: GroupTurns) -> Tensor:
    """Find the turns of episodes that have a return: indices, by episode and in an episode's
    order."""
    played = (turns.flags.long() & BOOTSTRAP) == 0
    where = played.nonzero()[:, 0]
    order = where[in_turn_order(turns.segment[where], turns.index[where])]
    segments, episode = _unique(turns.segment[order])
    index = turns.index[order]
    is_head = torch.ones(len(order), dtype=torch.bool)
    is_head[1:] = episode[1:] != episode[:-1]
    _check_contiguous(segments, episode, index, is_head)
    is_tail = is_head.roll(-1)
    ended = (turns.flags[order].long()[is_tail] & ENDED) > 0
    trained = torch.zeros(len(segments), dtype=torch.bool)
    trained[episode[turns.trained[order] > 0]] = True
    whole = ended & (index[is_head] == 0) & trained
    if not bool(whole.all()):
        missing = int((~whole).sum())
        logger.info(
            "%d of %d episodes have no return in this batch and are not trained on",
            missing,
            len(whole),
        )
    return order[whole[episode]]


def _unique(x: Tensor) -> tuple[Tensor, Tensor]:
    # torch does not declare the types of `unique`.
    return cast(Any, torch).unique(x, dim=0, return_inverse=True)


def _check_contiguous(segments: Tensor, episode: Tensor, index: Tensor, is_head: Tensor) -> None:
    wrong = ~is_head[1:] & (index[1:] != index[:-1] + 1)
    if not bool(wrong.any()):
        return
    i = int(wrong.nonzero()[0])
    segment = int(segments[episode[i]])
    raise TurnTableError(
        f"segment {segment}: turn {int(index[i])} is followed by turn {int(index[i + 1])}"
    )
