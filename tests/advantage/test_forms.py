"""Every form of GAE equals its definition, written out turn by turn, for all kinds of episodes."""

import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from advantage.gae import check_form
from slime_verlog import ConfigError
from tests.advantage.batches import (
    FakeSample,
    Rows,
    check,
    check_rows,
    make_args,
    make_samples,
    on_tokens,
    run,
    turns_of,
)


def by_hand(samples: list[FakeSample], args: Namespace) -> Rows:
    """From the last turn to the first: the forms `turn` and `bi_level`."""
    found: dict[Any, tuple[list[float], list[float]]] = {}
    first: dict[Any, tuple[float, float]] = {}
    turns = turns_of(samples, args.kl_coef)
    for place in sorted(turns, reverse=True):
        turn = turns[place]
        values, costs = turn.values, turn.token_rewards
        gamma, trace = (
            (args.gamma_step, args.lambda_step)
            if turn.moves
            else (args.gamma_token, args.lambda_token)
        )
        value, advantage = first.get(turn.following, (turn.bootstrap, 0.0))
        follows = turn.reward + gamma * value + gamma * trace * advantage
        row: list[float] = []
        returns: list[float] = []
        if not values:
            first[place] = turn.reward + gamma * value, gamma * trace * advantage
        elif args.gae_form == "turn":
            of_turn = sum(costs) + follows - values[0]
            first[place] = values[0], of_turn
            row, returns = [of_turn] * len(values), [of_turn + values[0]] * len(values)
        else:
            row = [costs[-1] + follows - values[-1]]
            first[place] = sum(costs[:-1]) + values[-1], row[0]
            for j in reversed(range(len(values) - 1)):
                delta = costs[j] + args.gamma_token * values[j + 1] - values[j]
                row.insert(0, delta + args.gamma_token * args.lambda_token * row[0])
            returns = [a + v for a, v in zip(row, values, strict=True)]
        found[place] = row, returns
    return on_tokens(samples, found)


@pytest.mark.parametrize("form", ["turn", "bi_level"])
@pytest.mark.parametrize("seed", range(15))
def test_turn_forms_agree_with_their_definition(form: str, seed: int) -> None:
    rng = random.Random(seed)
    samples = make_samples(rng, rng.randint(1, 6))
    keys = {
        "gae_form": form,
        "gamma_token": rng.choice([1.0, 0.9]),
        "lambda_token": rng.choice([1.0, 0.7]),
    }
    data, wanted = run(samples, **keys), by_hand(samples, make_args(**keys))
    check_rows(data["advantages"], [advantages for advantages, _ in wanted])
    check_rows(data["returns"], [returns for _, returns in wanted])


@pytest.mark.parametrize("seed", range(5))
def test_token_gae_over_the_episode_is_dual_with_one_discount_after_notes_too(seed: int) -> None:
    samples = make_samples(random.Random(seed), 5)
    data = run(samples, gae_form="token", gamma_token=0.3, lambda_token=0.2)
    check(data, samples, make_args(gamma_token=0.99, lambda_token=0.95))


def test_an_unknown_form_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="gae_form must be one of 'dual', .*'compaction', got 'mc'"
    ):
        run([], gae_form="mc")


OWN_FORMS = """
from advantage.gae import scan_dual

def half(values, rewards, lengths, turn_rewards, discounts):
    return scan_dual(values[:2], rewards if rewards is None else rewards[:2], lengths[:1], turn_rewards[:1], discounts)
"""


def test_the_form_of_the_page_about_changes_can_be_used_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "change_one_thing.md").read_text()
    (tmp_path / "my_forms.py").write_text(page.split("```python\n")[1].split("```")[0])
    form = f"{tmp_path}/my_forms.py:mean_value"
    check_form(form)
    samples = make_samples(random.Random(2), 4)
    one_value = [replace(sample, values=torch.full_like(sample.values, 0.25)) for sample in samples]
    found, turn = run(one_value, gae_form=form), run(one_value, gae_form="turn")
    for key in ("advantages", "returns"):
        assert all(torch.allclose(a, b) for a, b in zip(found[key], turn[key], strict=True))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{folder}/forms.py:missing", "forms.py has no function missing"),
        ("{folder}/none.py:form", "none.py cannot be imported: FileNotFoundError"),
        ("{folder}/broken.py:form", "broken.py cannot be imported: SyntaxError"),
        ("no_such_package.form", "no_such_package cannot be imported: ModuleNotFoundError"),
        ("math.sqrt", "math.sqrt fails on two turns: TypeError"),
        ("{folder}/forms.py:half", "for two turns of three tokens, the shapes are"),
    ],
)
def test_a_wrong_form_is_refused_before_anything_is_played(
    tmp_path: Path, path: str, words: str
) -> None:
    (tmp_path / "forms.py").write_text(OWN_FORMS)
    (tmp_path / "broken.py").write_text("def form(")
    with pytest.raises(ConfigError, match=words):
        check_form(path.format(folder=tmp_path))
