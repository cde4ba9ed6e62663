"""Compares turns in which the model wrote its notes with other turns."""

from torch import Tensor

from advantage.exchange import BOOTSTRAP, NOTES


def compare_notes(flags: Tensor, following: Tensor, next_advantage: Tensor) -> dict[str, Tensor]:
    """Compare turns that wrote notes with others, over the turns of all ranks, [T]; empty without
    either.

    `summary_optimism` is the mean of V - return after notes, minus that after other turns: notes
    that promise success raise the value of the next prompt, and with it their own advantage.
    `summary_advantage` and `turn_advantage` are means over turns of the two kinds, each with its
    standard deviation. Advantages are those of first tokens.

    Args:
        flags: `turn_flags` of each turn.
        following: index of the turn that follows, or -1.
        next_advantage: the advantage of that turn.
    """
    after = following.clamp(min=0)
    next_is_turn = flags[after] & BOOTSTRAP == 0
    followed = (following >= 0) & next_is_turn
    wrote_notes = flags & NOTES > 0
    after_notes = next_advantage[followed & wrote_notes]
    after_others = next_advantage[followed & ~wrote_notes]
    of_notes = next_advantage[followed & wrote_notes[after]]
    of_turns = next_advantage[followed & ~wrote_notes[after]]
    if not all(len(group) for group in (after_notes, after_others, of_notes, of_turns)):
        return {}
    return {
        "summary_optimism": after_others.mean() - after_notes.mean(),
        "summary_advantage": of_notes.mean(),
        "summary_advantage_std": of_notes.std(correction=0),
        "turn_advantage": of_turns.mean(),
        "turn_advantage_std": of_turns.std(correction=0),
    }
