"""Turns share a sample where their prompts allow it, and train what they train in samples of their
own."""

import hashlib
import random
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from advantage.hook import compute_advantages
from advantage.training.losses import turn_weights
from rollout.bridge.chains import continues, find_chains
from rollout.bridge.sample import SampleWriter, build_samples
from rollout.samples import pretraining_samples, turns_per_sample
from rollout.turn import FinishReason, Generation, ImageChain, Prompt, Turn
from tests.fixtures.conversations import by_turn, conversations, places, train_data

ARGS = Namespace(global_batch_size=6, rollout_top_p=1.0)


@given(st.randoms(use_true_random=False))
def test_chains_hold_every_turn_once_and_are_as_few_as_possible(rng: random.Random) -> None:
    (segment,), _ = conversations(rng, 1, rng.randint(1, 12))
    turns = segment.turns
    chains = find_chains(turns)
    assert sorted(place for chain in chains for place in chain) == list(range(len(turns)))
    for chain in chains:
        for before, after in pairwise(chain):
            assert continues(turns[after].prompt, turns[before])
    assert len(chains) == _fewest(turns)


def _fewest(turns: Sequence[Turn]) -> int:
    """The least number of chains: the largest matching of turns with turns that continue them says
    how many join."""
    count = range(len(turns))
    follows = [[a < b and continues(turns[b].prompt, turns[a]) for b in count] for a in count]
    followers = maximum_bipartite_matching(csr_array(follows))
    return len(turns) - int((followers >= 0).sum())


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_has_the_tokens_of_its_last_turn_and_slime_counts_the_same_groups(
    seed: int,
) -> None:
    segments, groups = conversations(random.Random(seed), 3, 24, first_group=5)
    alone, joined = (train_data(ARGS, segments, groups, chains=chains) for chains in (False, True))
    for turn, (sample, span) in places(alone).items():
        other, there = places(joined)[turn]
        assert _up_to(alone, sample, span) == _up_to(joined, other, there)
        for key in ("loss_masks", "rollout_log_probs"):
            assert alone[key][sample][span].tolist() == joined[key][other][there].tolist()
    assert list(dict.fromkeys(joined["rollout_ids"])) == list(dict.fromkeys(alone["rollout_ids"]))
    tokens, tokens_alone = (sum(map(len, data["tokens"])) for data in (joined, alone))
    assert len(joined["tokens"]) >= len(set(groups)) and tokens < tokens_alone


def _up_to(data: dict[str, Any], sample: int, span: slice) -> list[int]:
    """A sample's tokens up to the end of a turn."""
    tokens = data["tokens"][sample]
    return tokens[: len(tokens) - data["response_lengths"][sample] + span.stop].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_each_turn_counts_as_much_in_a_chain_as_alone(seed: int) -> None:
    segments, groups = conversations(random.Random(seed), 4, 24)

    def shares(chains: bool) -> dict[Any, list[float]]:
        data = train_data(ARGS, segments, groups, chains=chains)
        weights = []
        for mask, denominator in zip(data["loss_masks"], data["rollout_mask_sums"], strict=True):
            divisor = torch.tensor(float(denominator), dtype=torch.float64)
            weights.append(turn_weights(torch.as_tensor(mask), divisor) / divisor.clamp(min=1))
        outside = sum(float(row.sum()) for row in weights)
        found = by_turn(data, weights)
        assert sum(map(sum, found.values())) == pytest.approx(outside)
        return found

    alone, joined = shares(False), shares(True)
    for turn, weights in alone.items():
        assert weights == pytest.approx(joined[turn])


@pytest.mark.parametrize(
    "settings", [{}, {"gae_form": "turn"}, {"value_first_token_weight": 3.0, "lambda_token": 0.9}]
)
@pytest.mark.parametrize("seed", range(10))
def test_advantages_and_returns_of_a_turn_do_not_depend_on_its_sample(
    seed: int, settings: dict[str, Any]
) -> None:
    segments, groups = conversations(random.Random(seed), 4, 24)
    found = []
    for chains in (False, True):
        data = train_data(ARGS, segments, groups, [k % 3 for k in range(24)], chains=chains)
        rollout_data = {key: data[key] for key in ("prompt", "response_lengths")}
        rollout_data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
        rollout_data["loss_masks"] = [torch.as_tensor(mask) for mask in data["loss_masks"]]
        for name in ("values", "kl"):
            rollout_data[name] = [
                _made_up(name, *sample)
                for sample in zip(data["tokens"], data["response_lengths"], strict=True)
            ]
        compute_advantages(Namespace(kl_coef=0.1, **settings), rollout_data)
        found.append({key: by_turn(data, rollout_data[key]) for key in ("advantages", "returns")})
    for key, turns in found[0].items():
        for turn, numbers in turns.items():
            assert numbers == pytest.approx(found[1][key][turn], abs=1e-5), (key, turn)


def _made_up(name: str, tokens: Any, length: int) -> torch.Tensor:
    """A number for each response token that depends on the tokens before it, as a causal model's
    outputs do."""
    first = len(tokens) - length
    digests = [
        hashlib.blake2b(name.encode() + tokens[:end].tobytes(), digest_size=4).digest()
        for end in range(first, len(tokens))
    ]
    return torch.tensor([int.from_bytes(digest) / 2**31 - 1 for digest in digests])


def test_chains_end_with_their_optimizer_step_and_a_state_that_continues_one_is_its_end() -> None:
    (segment,), _ = conversations(random.Random(1), 1, 1)
    turns = [replace(segment.turns[0], terminated=False, truncated=False)]
    for k in range(1, 8):
        prompt = Prompt([*turns[-1].prompt.token_ids, *turns[-1].generation.token_ids, 3])
        turns.append(replace(turns[-1], index=turns[0].index + k, prompt=prompt))
    state = Prompt([*turns[-1].prompt.token_ids, *turns[-1].generation.token_ids, 3, 4])
    long = replace(segment, turns=tuple(turns), bootstrap=state)
    (samples,) = build_samples([long], list(range(40, 48)), SampleWriter(ARGS, 39, chains=True))
    assert [len(sample.train_metadata["turn_row"].turns) for sample in samples] == [6, 2]
    last = samples[-1].train_metadata["turn_row"]
    assert last.bootstrap == samples[-1].response_length - 1
    assert samples[-1].tokens[-4:] == [*turns[-1].generation.token_ids, 3, 4, 39][-4:]
    assert samples[-1].loss_mask[last.turns[-1].end :] == [0, 0, 0]
    assert turns_per_sample([samples]) == 4.0
    (alone,) = build_samples([long], list(range(40, 48)), SampleWriter(ARGS, 39))
    assert len(alone) == 9


def test_a_turn_whose_prompt_lacks_an_image_of_the_turn_before_begins_a_chain() -> None:
    (segment,), _ = conversations(random.Random(1), 1, 1)
    red, blue = ({"pixel_values": torch.full((2,), value)} for value in (1.0, 2.0))
    (turn,) = segment.turns
    first = replace(turn, prompt=replace(turn.prompt, train_inputs=ImageChain([red])))
    ids = [*first.prompt.token_ids, *first.generation.token_ids, 3]
    same = {"pixel_values": red["pixel_values"].clone()}
    for images, chains in (([red, blue], 1), ([same], 1), ([blue], 2)):
        prompt = replace(turn.prompt, token_ids=ids, train_inputs=ImageChain(images))
        second = replace(turn, index=turn.index + 1, prompt=prompt)
        assert len(find_chains([first, second])) == chains


def test_every_turn_of_a_chain_keeps_its_own_routed_experts() -> None:
    flags = {"use_rollout_routing_replay": True, "num_layers": 1, "moe_router_topk": 2}
    writer = SampleWriter(Namespace(**flags, **vars(ARGS)), 39, chains=True)
    sample = writer.new(0, 0, Prompt([1, 2]))

    answer = Generation([7, 8], [-0.1, -0.1], "x", FinishReason.STOP)
    for number in (1, 2):
        captured = torch.full((len(sample.tokens) + 1, 1, 2), number)  # of all tokens but the last

        def record(*_: Any, captured: Any = captured, **__: Any) -> None:
            """As slime does it: the engine's experts replace those of earlier turns."""
            sample.rollout_routed_experts = captured

        sample.append_response_tokens = record
        writer.append_generation(sample, answer)
        writer.append_masked(sample, [5])
    writer.append_state(sample, Prompt([*sample.tokens, 6]))
    first, second, after = sample.rollout_routed_experts.split([3, 3, len(sample.tokens) - 7])
    assert first.eq(1).all() and second.eq(2).all() and after.tolist() == [[[0, 1]]] * len(after)


def test_value_pretraining_keeps_chains_together_in_a_random_order() -> None:
    segments, groups = conversations(random.Random(3), 4, 24)
    held_out = {segments[0].turns[0].episode_id}
    made = pretraining_samples(segments, held_out, groups, 7, SampleWriter(ARGS, 39, chains=True))
    found = [sample for group in made for sample in group]
    assert sum(len(sample.train_metadata["turn_row"].turns) for sample in found) == 24
    assert len(found) < 24
    kinds = {
        (s.metadata["episode_id"] in held_out, s.train_metadata["turn_row"].kind.name)
        for s in found
    }
    assert kinds <= {(True, "HELD_OUT"), (False, "TURN"), (True, "BOOTSTRAP"), (False, "BOOTSTRAP")}
