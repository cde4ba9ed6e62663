"""Untrusted input ends in data or in a named error: 1,000 inputs a target by default, 100,000 with
`-m slow`."""

import random

import pytest

from tests.fuzz.targets import SEEDS, TARGETS, mutate


def throw(target: str, count: int) -> None:
    generator = random.Random(count)
    for number in range(count):
        data = mutate(generator.choice(SEEDS[target]), generator)
        try:
            TARGETS[target](data)
        except Exception as error:
            raise AssertionError(f"input {number} of {target}: {data!r}") from error


@pytest.mark.parametrize("target", TARGETS)
def test_any_input_ends_in_data_or_a_named_error(target: str) -> None:
    throw(target, 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_hundred_thousand_inputs_end_in_data_or_a_named_error(target: str) -> None:
    throw(target, 100_000)
