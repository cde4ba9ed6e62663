"""Finds the turns of an episode that can share a training sample, because each prompt repeats the turn before it.

A turn *continues* another if its prompt begins with all of that turn's tokens, prompt and response, and with its
images. Turns that continue each other form a chain. Trained as one sample, a chain has the tokens of its last turn
alone, so a conversation costs its length once instead of once per turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from rollout.tokens.token_prefix import token_prefix
from rollout.turn import ImageChain, Prompt, Turn

OPEN = 32
"""Chains of an episode that a turn may continue: those that grew last."""


@dataclass(frozen=True)
class _Content:
    tokens: bytes
    images: Sequence[Any]
    """The training inputs of each image."""

    def continues(self, other: "_Content") -> bool:
        """Whether this prompt begins with all of the other content, and goes on."""
        if len(self.tokens) <= len(other.tokens) or not self.tokens.startswith(other.tokens):
            return False
        if len(self.images) < len(other.images):
            return False
        return all(_same(mine, its) for mine, its in zip(self.images, other.images, strict=False))

    def followed_by(self, token_ids: Sequence[int]) -> "_Content":
        return _Content(self.tokens + _bytes(token_ids), self.images)


def find_chains(turns: Sequence[Turn]) -> list[list[int]]:
    """Return chains that hold every turn of an episode once, as positions in `turns`.

    A turn joins the longest of the `OPEN` last chains that it continues, which gives the fewest chains unless more are
    open. Of several turns that continue the same one, such as a request that is sent again, the first takes the chain,
    and the others begin new ones.
    """
    chains: list[list[int]] = []
    open_chains: list[tuple[_Content, list[int]]] = []
    for position, turn in enumerate(turns):
        prompt = _content(turn.prompt)
        fitting = [one for one in open_chains if prompt.continues(one[0])]
        if fitting:
            longest = max(fitting, key=lambda one: len(one[0].tokens))
            open_chains.remove(longest)
            chain = longest[1]
        else:
            chain = list[int]()
            chains.append(chain)
        chain.append(position)
        whole = prompt.followed_by(turn.generation.token_ids)
        open_chains = [*open_chains[1 - OPEN :], (whole, chain)]
    return chains


def continues(prompt: Prompt, turn: Turn) -> bool:
    """Whether the prompt begins with the turn's prompt and response, and goes on."""
    return _content(prompt).continues(_content(turn.prompt).followed_by(turn.generation.token_ids))


def cut_chain(chain: Sequence[int], steps: Sequence[int]) -> list[list[int]]:
    """Cut a chain wherever the optimizer step changes; `steps` has the step of each turn of the episode."""
    return [list(part) for _, part in groupby(chain, key=steps.__getitem__)]


def places_of(groups: Sequence[int], later: Sequence[Sequence[int]]) -> list[int]:
    """Return each sample's position in the train data, from its training group and the groups of its later turns.

    Where samples hold several turns, the converter sorts by group and adds padding to each later one.
    """
    added = [group for more in later for group in more]
    together = [*groups, *added]
    order = sorted(range(len(together)), key=together.__getitem__ if added else None)
    places = {number: place for place, number in enumerate(order)}
    return [places[number] for number in range(len(groups))]


def _content(prompt: Prompt) -> _Content:
    inputs = prompt.train_inputs
    images = inputs.parts if isinstance(inputs, ImageChain) else () if inputs is None else (inputs,)
    return _Content(_bytes(prompt.token_ids), images)


def _bytes(token_ids: Sequence[int]) -> bytes:
    return token_prefix(token_ids).to_numpy().tobytes()


def _same(mine: Any, its: Any) -> bool:
    """Whether two images' training inputs are equal; usually they are one object."""
    return mine is its or (mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine))
