"""Solves the recursion inside turns, A_j = d_j + c A_{j+1}, for all turns at once; `gae.py` defines d and c.

The tokens of all turns are laid end to end and cut into rows of 32, wherever turns begin and end. Here are turns of 86,
42, 13 and 19 tokens; each dot is two tokens, "|" a turn's last token, and "<" is where what follows a row enters it:

    row 0   . . . . . . . . . . . . . . . . <   no turn ends in rows 0 and 1: one product with a [32, 32] matrix of
    row 1   . . . . . . . . . . . . . . . . <   powers of c solves all such rows at once
    row 2   . . . . . . . . . . | . . . . . <   turns end in rows 2 to 4: all such rows, of which there is at most one
    row 3   . . . . . . . . . . . . . . . |     per turn, are solved together, column by column from the right
    row 4   . . . . . . | . . . . . . . . |

A loop over tokens would take as many steps as the longest turn has tokens; rows of 32 need at most 32. What enters a
row reaches its first token with the factor c^32, so the rows of one turn form a chain, which is solved by doubling.
Turns whose lambda depends on their length (`scan_turns_by_decay`) use such a chain for every token. To find what
follows each turn, only the first tokens of rows are needed; the others are computed at the end, in blocks that fit a
CPU's cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

ROW = 32
"""Tokens per row: the smallest matrix that keeps a CPU core busy."""
BLOCK = 2048
"""Rows per block: float64 copies of so many rows fit a CPU core's cache."""


@dataclass(frozen=True)
class TurnScan:
    """One form's result inside turns; N tokens, T turns. No entry of a turn without tokens is used."""

    entry_value: Tensor
    """[T] the value from which the previous turn bootstraps."""
    entry_advantage: Tensor
    """[T] the advantage that the previous turn sees, if nothing followed this turn."""
    entry_decay: Tensor
    """[T] decay from the turn's last token to the entry advantage."""
    finish: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Advantages and returns [N] in the values' dtype, from what reaches each turn's last token [T]. Call it once."""


def scan_turns(
    values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, gamma: float, decay: float
) -> TurnScan:
    """Solve GAE inside turns; `turn_rewards` [T] float64 fall on last tokens, `decay` is gamma times lambda."""
    nonempty = (lengths > 0).nonzero()[:, 0]
    after = lengths.cumsum(0).index_select(0, nonempty)
    first, last = after - lengths.index_select(0, nonempty), after - 1
    rows = _Rows(values, rewards, first, last, gamma, decay)
    rows.solve(turn_rewards.index_select(0, nonempty))

    entry = (values.index_select(0, first).double(), rows.first_advantages(), decay ** (last - first).double())
    state, alone, reach = _per_turn(entry, nonempty, lengths)
    return TurnScan(state, alone, reach, lambda carry: rows.finish(carry.index_select(0, nonempty)))


def _per_turn(entries: Sequence[Tensor], nonempty: Tensor, lengths: Tensor) -> list[Tensor]:
    """Spread the entries of nonempty turns over all turns, [T] float64 each; 0 for empty turns."""
    zeros = torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
    return [zeros.index_copy(0, nonempty, entry) for entry in entries]


def scan_turns_by_decay(
    values: Tensor, rewards: Tensor | None, lengths: Tensor, turn_rewards: Tensor, gamma: float, lambdas: Tensor
) -> TurnScan:
    """Run `scan_turns` with another lambda for each turn, `lambdas` [T]; several times slower."""
    turn = torch.repeat_interleave(lengths)
    last = lengths.cumsum(0) - 1
    place = torch.arange(len(values), device=values.device)
    is_last = place == last[turn]
    deltas = gamma * torch.where(is_last, 0.0, values.double().roll(-1)) - values
    if rewards is not None:
        deltas += rewards
    deltas += torch.where(is_last, turn_rewards[turn], 0.0)
    decay = gamma * lambdas
    longest = int(lengths.max()) if len(lengths) else 0
    alone = solve_runs(deltas, torch.where(is_last, 0.0, decay[turn]), longest)
    reach = decay[turn] ** (last[turn] - place).double()

    def finish(carry: Tensor) -> tuple[Tensor, Tensor]:
        advantages = alone + reach * carry[turn]
        return advantages.to(values.dtype), (advantages + values).to(values.dtype)

    nonempty = (lengths > 0).nonzero()[:, 0]
    first = (last - lengths + 1)[nonempty]
    entry = (values[first].double(), alone[first], reach[first])
    return TurnScan(*_per_turn(entry, nonempty, lengths), finish=finish)


class _Rows:
    """The tokens of T nonempty turns in n rows; columns are the B rows with a turn's last token, one vector per column.

    | attribute | shape | meaning |
    |---|---|---|
    | `_values`, `_rewards` | [N] | the inputs, token by token |
    | `_first`, `_last` | [T] | positions of each turn's first and last token |
    | `_ending` | [B] | rows that contain a turn's last token, in order |
    | `_slot` | [T] | each turn's last row, as an index into `_ending` |
    | `_last_in_columns` | [T] | position of each turn's last token in flattened columns |
    | `_going_on`, `_decays` | [ROW, B] | 0 at a turn's last token, otherwise 1 and the decay |
    | `_powers` | [ROW] | decay^0, decay^1, ... |
    | `_of_rewards` | [ROW, ROW] | a row's rewards times this are their part of its advantages |
    | `_of_values` | [ROW, ROW] | a row's values times this are theirs |
    | `_ending_values` | [ROW, B] | the values of the rows in `_ending` |
    | `_columns` | [ROW, B] | their advantages, without what follows the row |
    | `_heads` | [n] | advantage of each row's first token, without what follows the row |
    | `_follows` | [n] | gamma V + c A of the token after each row if nothing follows its turn; 0 after a last token |
    """

    def __init__(
        self, values: Tensor, rewards: Tensor | None, first: Tensor, last: Tensor, gamma: float, decay: float
    ) -> None:
        self._values, self._rewards, self._first, self._last = values, rewards, first, last
        self._gamma, self._decay = gamma, decay
        distinct: Callable[..., tuple[Tensor, Tensor]] = cast(Any, torch).unique_consecutive
        self._ending, self._slot = distinct(last // ROW, return_inverse=True)
        self._last_in_columns = last % ROW * len(self._ending) + self._slot
        going_on = torch.ones(ROW, len(self._ending), dtype=torch.float64, device=values.device)
        going_on.view(-1).index_fill_(0, self._last_in_columns, 0)
        self._going_on = going_on
        self._decays = decay * going_on
        steps = torch.arange(ROW, device=values.device)
        gap = steps[:, None] - steps
        self._powers = decay ** steps.double()
        self._of_rewards = torch.where(gap >= 0, self._powers[gap.clamp(min=0)], 0.0)
        self._of_values = (gamma * (gap == 1).double() - (gap == 0).double()) @ self._of_rewards

    def solve(self, turn_rewards: Tensor) -> None:
        """Solve the rows with a turn's last token, and find what follows each row, if nothing follows any turn."""
        self._ending_values = self._select(self._values)
        columns = -self._ending_values
        columns[:-1].addcmul_(self._going_on[:-1], self._ending_values[1:], value=self._gamma)
        if self._rewards is not None:
            columns.add_(self._select(self._rewards))
        columns.view(-1).index_add_(0, self._last_in_columns, turn_rewards)
        self._columns = self._solve_columns(columns)
        heads = [solved[:, 0] for _, _, solved in self._solved_blocks(1)]
        self._heads = torch.cat([*heads, columns.new_zeros(0)]).index_copy_(0, self._ending, columns[0])
        n = len(self._heads)
        ends = torch.zeros(n + 1, dtype=torch.bool, device=self._heads.device)
        ends.index_fill_(0, self._ending, True)
        goes_on = self._heads.new_ones(n).index_copy_(0, self._ending, self._going_on[-1])
        after = F.pad(self._values[ROW::ROW].double(), (0, n))[:n]
        a = goes_on * (self._gamma * after + self._decay * F.pad(self._heads[1:], (0, 1))[:n])
        # What follows a row with a turn's last token does not reach the row's first token.
        stops = ends[1:] | (goes_on == 0)
        b = torch.where(stops, 0.0, torch.full_like(a, self._decay**ROW))
        longest = (self._last // ROW - self._first // ROW).max() + 1 if n else 0
        self._follows = solve_runs(a, b, int(longest))

    def first_advantages(self) -> Tensor:
        """[T] advantage of each turn's first token, if nothing follows the turn."""
        row, column = self._first // ROW, self._first % ROW
        # A turn that does not start with a row starts in the row of another turn's last token.
        shared = self._columns.view(-1)[column * len(self._ending) + F.pad(self._slot, (1, 0))[:-1]]
        reach = self._powers[ROW - 1 - column] * (row != self._last // ROW)
        return torch.where(column == 0, self._heads[row], shared) + reach * self._follows[row]

    def finish(self, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns, [N], if `carry` [T] reaches each turn's last token."""
        turn = torch.repeat_interleave((self._last + 1) // ROW - self._first // ROW)
        gap = self._last[turn] - (torch.arange(len(turn), device=carry.device) * ROW + ROW - 1)
        self._follows[: len(turn)] += self._decay ** gap.double() * carry[turn]
        columns = torch.zeros_like(self._going_on)
        columns[-1] = self._follows[self._ending]
        columns.view(-1).index_copy_(0, self._last_in_columns, carry)
        ending = self._solve_columns(columns).add_(self._columns)
        advantages, returns = (self._values.new_empty(len(self._heads), ROW) for _ in range(2))
        for rows, values, solved in self._solved_blocks(ROW):
            solved.addr_(self._follows[rows], self._powers.flip(0))
            advantages[rows] = solved
            returns[rows] = solved.add_(values)
        for target, columns in ((advantages, ending), (returns, ending + self._ending_values)):
            target.index_copy_(0, self._ending, columns.T.to(target.dtype))
        tokens = len(self._values)
        return advantages.view(-1)[:tokens], returns.view(-1)[:tokens]

    def _solved_blocks(self, columns: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each block's rows, values and first columns of advantages, as if no turn ended or followed."""
        of_values, of_rewards = self._of_values[:, :columns], self._of_rewards[:, :columns]
        count = -(-len(self._values) // ROW)
        for start in range(0, count, BLOCK):
            rows = slice(start, min(start + BLOCK, count))
            values = _rows(self._values, rows)
            solved = values @ of_values
            if self._rewards is not None:
                solved.addmm_(_rows(self._rewards, rows), of_rewards)
            yield rows, values, solved

    def _solve_columns(self, columns: Tensor) -> Tensor:
        """The recursion inside the rows with a turn's last token, in place."""
        for j in reversed(range(ROW - 1)):
            columns[j].addcmul_(self._decays[j], columns[j + 1])
        return columns

    def _select(self, x: Tensor) -> Tensor:
        # Only the last row can be incomplete, and a turn ends there.
        partial = len(x) % ROW
        whole = x[: len(x) - partial].view(-1, ROW)
        found = whole.index_select(0, self._ending[: len(self._ending) - bool(partial)])
        if partial:
            found = torch.cat([found, F.pad(x[-partial:], (0, ROW - partial))[None]])
        return found.T.contiguous().double()


def _rows(x: Tensor, rows: slice) -> Tensor:
    """These rows of `x` [N], with zeros after its last token; [rows, ROW] float64."""
    part = x[rows.start * ROW : rows.stop * ROW].double()
    missing = (rows.stop - rows.start) * ROW - len(part)
    return (F.pad(part, (0, missing)) if missing else part).view(-1, ROW)


def solve_chain(a: Tensor, b: Tensor, following: Tensor) -> Tensor:
    """Solve x[i] = a[i] + b[i] x[following[i]]; a `following` of -1 ends a chain. All [n], no cycles."""
    n = a.numel()
    # One extra entry, which points at itself, ends every chain.
    a, b = torch.cat([a, a.new_zeros(1)]), torch.cat([b, b.new_zeros(1)])
    jump = torch.cat([torch.where(following < 0, n, following), following.new_full((1,), n)])
    while bool((jump != n).any()):
        # index_select is several times faster on a CPU than indexing.
        a = torch.addcmul(a, b, a.index_select(0, jump))
        b, jump = b * b.index_select(0, jump), jump.index_select(0, jump)
    return a[:n]


def solve_runs(a: Tensor, b: Tensor, longest: int) -> Tensor:
    """Solve x[i] = a[i] + b[i] x[i + 1] in place of `a`; of every `longest` adjacent b, at least one is 0. All [n]."""
    step = 1
    while step < min(longest, len(a)):
        a[:-step] += b[:-step] * a[step:]
        b = F.pad(b[:-step] * b[step:], (0, step))
        step *= 2
    return a


def gather_next(x: Tensor, following: Tensor, otherwise: Tensor) -> Tensor:
    """Pick x[following], or `otherwise` if nothing follows; all [T]."""
    return torch.where(following >= 0, x[following.clamp(min=0)], otherwise) if x.numel() else otherwise
