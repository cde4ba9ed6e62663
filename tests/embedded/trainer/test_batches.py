"""Every sample is trained on exactly once, in the step of its group, at its own positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embedded.trainer.batches import micro_batches, optimizer_steps
from embedded.trainer.losses import policy_loss, value_loss
from rollout.errors import ConfigError


@given(st.lists(st.integers(0, 6), min_size=1), st.integers(1, 4))
def test_steps_hold_whole_groups_and_all_samples(groups: list[int], size: int) -> None:
    if len(set(groups)) % size:
        with pytest.raises(ConfigError, match="do not fill steps"):
            optimizer_steps(groups, size)
        return
    steps = optimizer_steps(groups, size)
    assert sorted(i for step in steps for i in step) == list(range(len(groups)))
    for step in steps:
        members = {groups[i] for i in step}
        assert len(members) == size
        assert all((groups[i] in members) == (i in step) for i in range(len(groups)))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 120),
)
def test_micro_batches_keep_to_their_size_and_point_at_what_predicts_each_token(
    shapes: list[tuple[int, int]], most: int
) -> None:
    numbers = iter(range(10_000))
    tokens = [
        torch.tensor([next(numbers) for _ in range(prompt + answer)]) for prompt, answer in shapes
    ]
    data = {
        "tokens": tokens,
        "total_lengths": [len(t) for t in tokens],
        "response_lengths": [answer for _, answer in shapes],
    }
    batches = micro_batches(data, range(len(tokens)), most)
    assert sorted(i for batch in batches for i in batch.samples) == list(range(len(tokens)))
    for batch in batches:
        assert batch.ids.numel() <= most or len(batch.samples) == 1
        wanted = torch.cat(
            [tokens[i][len(tokens[i]) - data["response_lengths"][i] :] for i in batch.samples]
        )
        assert torch.equal(batch.targets, wanted)
        # The token after each position is the one that the position predicts.
        assert torch.equal(batch.ids[batch.row, batch.column + 1], wanted)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 2.0, -2.4, 1),
        (0.5, 2.0, -1.0, 0),
        (1.5, -2.0, 3.0, 0),
        (0.5, -2.0, 1.6, 1),
        (5.0, -2.0, 6.0, 0),
    ],
)
def test_the_policy_loss_is_clipped_on_the_side_that_would_gain(
    ratio: float, advantage: float, loss: float, clipped: int
) -> None:
    found, where = policy_loss(
        torch.tensor([ratio]).log(),
        torch.zeros(1),
        torch.tensor([advantage]),
        eps_clip=0.2,
        eps_clip_high=0.2,
        eps_clip_c=3.0,
    )
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert where.item() == clipped


def test_the_upper_clip_can_differ_from_the_lower() -> None:
    log_ratio = torch.tensor([2.0]).log()
    found, _ = policy_loss(
        log_ratio, torch.zeros(1), torch.ones(1), eps_clip=0.2, eps_clip_high=0.4, eps_clip_c=None
    )
    assert found.item() == pytest.approx(-1.4)


def test_the_value_loss_takes_the_worse_of_plain_and_clipped() -> None:
    values, old, returns = (
        torch.tensor([1.0, 0.2, -2.0]),
        torch.zeros(3),
        torch.tensor([1.0, 1.0, -0.1]),
    )
    loss, clipped = value_loss(values, old, returns, 0.5)
    assert loss.tolist() == pytest.approx([0.25, 0.64, 3.61])
    assert clipped.tolist() == [1, 0, 1]
