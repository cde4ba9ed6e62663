"""Estimators without a critic that compare episodes in groups: GRPO, RLOO and GiGPO, with one sample per turn.

Episodes are compared by the returns of whole episodes, never turn by turn: those that reach turn t are a biased
selection. GiGPO also compares turns with the same anchor, which is the prompt. docs/algorithms.md has the definitions.
"""

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from advantage.errors import TurnTableError
from advantage.exchange import BOOTSTRAP, ENDED, NOTES, Exchange, current_layout, in_turn_order, relayed, turn_flags
from advantage.flags import GROUP, advantage_flags, check_kl
from advantage.gae import discounts_of, edges_of, solve_chain
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


def compute_advantages(args: Any, rollout_data: MutableMapping[str, Any]) -> None:
    """Write `advantages` and `returns` into `rollout_data`: each turn's advantage, on all its trained tokens.

    This is slime's `--custom-advantage-function-path` for estimators without a critic. Returns equal the advantages.

    Args:
        args: slime's arguments, with the YAML's keys `group_estimator`, `gamma_step` and those of GiGPO.
        rollout_data: as for `advantage.hook.compute_advantages`, without `values`; rows are shaped and typed like `kl`.

    Raises:
        ConfigError: an unknown estimator, or KL in the reward, which these estimators do not support.
        TurnTableError: the table is missing or foreign, or turns are missing in an episode.
        OtherRankError: another rank of this pipeline stage failed, so this rank stops too.
    """
    from advantage.patch.steps import install_late  # the patch imports this folder

    layout = current_layout()
    install_late(advantage_settings(args))
    if not layout.last_stage:
        return
    with relayed(layout.stage), Exchange(layout.data) as exchange:
        settings, flags = advantage_settings(args), advantage_flags(args)
        check_kl(replace(flags, custom_advantage_function_path=GROUP))
        columns = read_turn_table(rollout_data, keep=flags.rollout_data_postprocess_path == KL_SPLIT)
        packed = pack_turns(columns, rollout_data["loss_masks"], rollout_data["response_lengths"])
        group = columns.group.masked_fill(columns.bootstrap, -1)
        if flags.n_samples_per_prompt == 1:  # no two episodes share a start
            group = torch.full_like(group, -1)
        trained = packed.trained.cpu()
        own = (columns.segment, columns.index, turn_flags(columns), columns.reward, group, columns.anchor, trained)
        table, mine = exchange.rows(torch.stack([column.double() for column in own], 1))
        turns = GroupTurns(*table.unbind(1))
        advantages = group_advantages(turns, settings, normalize=flags.grpo_std_normalization)
        per_turn = advantages[mine].to(packed.trained.device) * packed.trained
        per_token = torch.repeat_interleave(per_turn, packed.lengths)
        rows = local_tokens(rollout_data, layout).split(packed.put(per_token))
        pairs = zip(rows, rollout_data["kl"], strict=True)
        rollout_data["advantages"] = [row.to(like.dtype) for row, like in pairs]
        rollout_data["returns"] = [row.clone() for row in rollout_data["advantages"]]


def group_advantages(turns: GroupTurns, settings: AdvantageSettings, *, normalize: bool) -> Tensor:
    """Compute one advantage per turn, [T] float64; 0 for bootstrap states and for episodes without a return.

    `normalize` divides by the group's standard deviation (GRPO, GiGPO). Raises TurnTableError, which names segment and
    turn, if a turn is missing in an episode or occurs twice.
    """
    played = (turns.flags.long() & BOOTSTRAP) == 0
    where = played.nonzero()[:, 0]
    segments, episode = _unique(turns.segment[where])
    result = torch.zeros(len(played), dtype=torch.float64)
    if not len(segments):
        return result
    order = where[in_turn_order(episode, turns.index[where])]
    episode = torch.searchsorted(segments, turns.segment[order])
    index = turns.index[order]
    flags = turns.flags[order].long()
    reward = turns.reward[order]
    is_head = torch.ones(len(order), dtype=torch.bool)
    is_head[1:] = episode[1:] != episode[:-1]
    _check_contiguous(segments, episode, index, is_head)
    is_tail = is_head.roll(-1)
    following = torch.arange(1, len(order) + 1)
    following[is_tail] = -1
    edges = edges_of(flags & NOTES == 0, discounts_of(settings, "actor"))
    to_go = solve_chain(reward, edges.gamma, following)

    ended = (flags[is_tail] & ENDED) > 0
    trained = torch.zeros(len(segments), dtype=torch.bool)
    trained[episode[turns.trained[order] > 0]] = True
    whole = ended & (index[is_head] == 0) & trained
    if not bool(whole.all()):
        missing = int((~whole).sum())
        logger.info("%d of %d episodes have no return in this batch and are not trained on", missing, len(whole))
    group = turns.group[order][is_head]
    estimator = settings.group_estimator or "grpo"
    returns = to_go[is_head]
    if estimator == "gigpo" and settings.gigpo_discount == "step":
        returns = torch.zeros_like(returns).index_add_(0, episode, reward)  # undiscounted
    scores = _compare(returns, group, whole, estimator, normalize)
    advantages = scores[episode]
    if estimator == "gigpo":
        anchor = turns.anchor[order]
        _, state = _unique(torch.stack([group[episode], anchor], 1))
        compared = whole[episode] & (anchor >= 0)
        partners, _, _ = _statistics(to_go, state, compared)
        shared = compared & (partners > 1)
        percent = 100 * float(shared.double().mean())
        logger.info("GiGPO: %.1f %% of the turns share their prompt with another turn", percent)
        of_turns = _relative(to_go, state, compared, normalize)
        advantages = advantages + settings.gigpo_step_weight * of_turns
    result[order] = advantages
    return result


def _compare(returns: Tensor, group: Tensor, whole: Tensor, estimator: str, normalize: bool) -> Tensor:
    _, groups = _unique(group)
    if estimator != "rloo":
        return _relative(returns, groups, whole, normalize)
    count, mean, _ = _statistics(returns, groups, whole)
    # Leave one out: R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1).
    relative = (returns - mean) * count / (count - 1).clamp(min=1)
    return torch.where(whole & (count > 1), relative, 0.0)


def _relative(x: Tensor, groups: Tensor, counted: Tensor, normalize: bool) -> Tensor:
    """x minus its group's mean, optionally over the standard deviation; 0 if not counted or alone in its group."""
    count, mean, deviation = _statistics(x, groups, counted)
    scale = deviation + 1e-6 if normalize else torch.ones_like(x)
    return torch.where(counted & (count > 1), (x - mean) / scale, 0.0)


def _statistics(x: Tensor, groups: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and standard deviation (n - 1) of each entry's group, over the counted entries."""
    n = int(groups.max()) + 1 if len(groups) else 0

    def total(y: Tensor) -> Tensor:
        sums = torch.zeros(n, dtype=torch.float64)
        sums.index_add_(0, groups, torch.where(counted, y, 0.0))
        return sums[groups]

    count = total(torch.ones_like(x))
    mean = total(x) / count.clamp(min=1)
    squares = total((x - mean) ** 2)
    variance = squares / (count - 1).clamp(min=1)
    return count, mean, variance.sqrt()


def _unique(x: Tensor) -> tuple[Tensor, Tensor]:
    return cast(Any, torch).unique(x, dim=0, return_inverse=True)  # torch does not declare the types of `unique`


def _check_contiguous(segments: Tensor, episode: Tensor, index: Tensor, is_head: Tensor) -> None:
    wrong = ~is_head[1:] & (index[1:] != index[:-1] + 1)
    if not bool(wrong.any()):
        return
    i = int(wrong.nonzero()[0])
    segment = int(segments[episode[i]])
    raise TurnTableError(f"segment {segment}: turn {int(index[i])} is followed by turn {int(index[i + 1])}")
