"""Another lambda for the critic, and one that depends on the turn's length, against the definition
in float64."""

import random
from argparse import Namespace
from typing import Any

import pytest

from advantage.errors import FlagError
from advantage.settings import PRESETS, ROLE, AdvantageSettings, advantage_settings
from slime_verlog import ConfigError, read_settings
from tests.advantage.batches import check, make_args, make_samples, run

ADAPTIVE = {"lambda_policy": "length_adaptive", "lambda_policy_alpha": 0.4}


def adaptive(tokens: int) -> float:
    return max(0.0, 1 - 1 / (0.4 * tokens)) if tokens else 0.0


@pytest.mark.parametrize("seed", range(6))
def test_lambda_critic_is_the_critics_alone_and_the_lambda_of_each_turns_length_the_actors(
    seed: int,
) -> None:
    """`lambda_critic` holds between tokens and between turns; a turn's length is that of its
    trained tokens."""
    rng = random.Random(seed)
    samples, critic = make_samples(rng, 6), rng.choice([0.0, 0.3, 1.0])
    shared = {"lambda_step": rng.choice([0.0, 0.6, 0.9]), "gamma_token": rng.choice([1.0, 0.9])}
    shared["lambda_token"] = 0.7
    for role, keys, lambdas in (
        ("critic", {"lambda_critic": critic}, {"lambda_step": critic, "lambda_token": critic}),
        ("actor", {"lambda_critic": critic}, {}),
        ("actor", ADAPTIVE, {"lambda_token": adaptive}),
        ("critic", ADAPTIVE, {}),
    ):
        data = run(samples, **{ROLE: role}, **keys, **shared)
        check(data, samples, make_args(**shared | lambdas))


@pytest.mark.parametrize("changes", [{"lambda_critic": 1.0}, ADAPTIVE])
def test_a_process_that_does_not_know_its_role_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FlagError, match="--custom-megatron-init-path advantage.patch.install"):
        run(make_samples(random.Random(0), 2), **changes)


def test_a_form_without_a_lambda_inside_turns_is_refused_with_one() -> None:
    with pytest.raises(ConfigError, match="use gae_form: dual, or lambda_policy: fixed"):
        read_settings(AdvantageSettings, {**ADAPTIVE, "gae_form": "turn"})


def test_the_preset_is_its_keys_and_the_yamls_own_take_precedence() -> None:
    preset = advantage_settings(Namespace(preset="sao", critic_updates=1, lambda_critic=None))
    spelt_out = {**PRESETS["sao"], "preset": "sao", "critic_updates": 1, "lambda_critic": None}
    assert preset == read_settings(AdvantageSettings, spelt_out)
    assert (preset.policy_loss, preset.lambda_policy, preset.lambda_step) == (
        "dis",
        "length_adaptive",
        1.0,
    )
