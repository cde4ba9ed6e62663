"""Finds the turns of an episode that can share a training sample, because each prompt repeats the
turn before it.

A turn *continues* another if its prompt begins with all of that turn's tokens, prompt and response,
and with its images. Turns that continue each other form a chain. Trained as one sample, a chain has
the tokens of its last turn alone, so a conversation costs its length once instead of once per turn.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from rollout.tokens.token_prefix import token_prefix
from rollout.turn import Prompt, Turn

OPEN = 32
"""Chains of an episode that a turn may continue: those that grew last."""


def find_chains(turns: Sequence[Turn]) -> list[list[int]]:
    """Return chains that hold every turn of an episode once, as positions in `turns`.

    A turn joins the longest of the `OPEN` last chains that it continues, which gives the fewest
    chains unless more are open. Of several turns that continue the same one, such as a request that
    is sent again, the first takes the chain, and the others begin new ones.
    """
    chains: list[list[int]] = []
    open_chains: list[list[int]] = []
    for position, turn in enumerate(turns):
        fitting = [chain for chain in open_chains if continues(turn.prompt, turns[chain[-1]])]
        if fitting:
            chain = max(fitting, key=lambda chain: _length(turns[chain[-1]]))
            open_chains.remove(chain)
        else:
            chain = list[int]()
            chains.append(chain)
        chain.append(position)
        open_chains = [*open_chains[1 - OPEN :], chain]
    return chains


def continues(prompt: Prompt, turn: Turn) -> bool:
    """Whether the prompt begins with the turn's prompt and response, and goes on."""
    earlier = turn.prompt
    answer = turn.generation.token_ids
    length = _length(turn)
    ids = prompt.token_ids
    if len(ids) <= length or (answer and ids[length - 1] != answer[-1]):
        return False
    if not _bytes(ids).startswith(_bytes(earlier.token_ids) + _bytes(answer)):
        return False
    images, earlier_images = (
        found.train_inputs.parts if found.train_inputs else () for found in (prompt, earlier)
    )
    return len(images) >= len(earlier_images) and all(map(_same, images, earlier_images))


def cut_chain(chain: Sequence[int], steps: Sequence[int]) -> list[list[int]]:
    """Cut a chain wherever the optimizer step changes; `steps` has the step of each turn of the
    episode."""
    return [list(part) for _, part in groupby(chain, key=steps.__getitem__)]


def places_of(groups: Sequence[int], later: Sequence[Sequence[int]]) -> list[int]:
    """Return each sample's position in the train data, from its training group and the groups of
    its later turns.

    Where samples hold several turns, the converter sorts by group and adds padding to each later
    one.
    """
    added = [group for more in later for group in more]
    together = [*groups, *added]
    order = sorted(range(len(together)), key=together.__getitem__ if added else None)
    places = {number: place for place, number in enumerate(order)}
    return [places[number] for number in range(len(groups))]


def _length(turn: Turn) -> int:
    return len(turn.prompt.token_ids) + len(turn.generation.token_ids)


def _bytes(token_ids: Sequence[int]) -> bytes:
    return token_prefix(token_ids).to_numpy().tobytes()


def _same(mine: Any, its: Any) -> bool:
    """Whether two images' training inputs are equal; usually they are one object."""
    return mine is its or (
        mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)
    )
