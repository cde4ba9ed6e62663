"""Every form of GAE equals its definition, written out turn by turn, for all kinds of episodes."""

import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from advantage.gae import check_form
from advantage.hook import compute_advantages
from advantage.turn_table import TurnKind
from slime_verlog import ConfigError
from tests.advantage.batches import FakeSample, expected, make_args, make_samples, rollout_data


def run(samples: list[FakeSample], args: Namespace) -> dict[str, Any]:
    data = rollout_data(samples)
    compute_advantages(args, data)
    return data


def episodes(samples: list[FakeSample]) -> list[list[tuple[FakeSample, Any]]]:
    """The turns of each segment in order, the bootstrap state (span None) last."""
    turns: dict[int, list] = {}
    for sample in sorted(samples, key=lambda s: s.row.first_turn):
        turns.setdefault(sample.row.segment, []).extend((sample, span) for span in sample.row.turns or (None,))
    return list(turns.values())


def tokens_of(sample: FakeSample, span: Any) -> list[int]:
    inside = list(range(span.start, span.end))
    return [j for j in inside if sample.mask[j]] or inside


def by_hand(samples: list[FakeSample], args: Namespace) -> dict[tuple[int, int], tuple[float, float]]:
    """(advantage, return) of every trained token, by (sample, token): the definitions of `turn` and `bi_level`."""
    position = {id(sample): i for i, sample in enumerate(samples)}
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for turns in episodes(samples):
        v_next = a_next = 0.0
        for sample, span in reversed(turns):
            if sample.row.kind is TurnKind.BOOTSTRAP:
                v_next, a_next = float(sample.values[0]), 0.0
                continue
            if span is sample.row.turns[-1] and sample.row.terminated:
                v_next = a_next = 0.0
            places = tokens_of(sample, span)
            gamma, lam = (args.gamma_step, args.lambda_step) if span.moves else (args.gamma_token, args.lambda_token)
            if not places:
                v_next, a_next = span.reward + gamma * v_next, gamma * lam * a_next
                continue
            values = [float(sample.values[j]) for j in places]
            costs = [-args.kl_coef * float(sample.kl[j]) * sample.mask[j] for j in places]
            follows = gamma * v_next + gamma * lam * a_next
            if args.gae_form == "turn":
                a = sum(costs) + span.reward - values[0] + follows
                row, v_next, a_next = [(a, a + values[0])] * len(places), values[0], a
            else:
                a = costs[-1] + span.reward - values[-1] + follows
                v_next, a_next = sum(costs[:-1]) + values[-1], a
                row = [(a, a + values[-1])]
                for j in reversed(range(len(places) - 1)):
                    delta = costs[j] + args.gamma_token * values[j + 1] - values[j]
                    a = delta + args.gamma_token * args.lambda_token * a
                    row.insert(0, (a, a + values[j]))
            found |= {(position[id(sample)], j): x for j, x in zip(places, row, strict=True) if sample.mask[j]}
    return found


@pytest.mark.parametrize("form", ["turn", "bi_level"])
@pytest.mark.parametrize("seed", range(15))
def test_turn_forms_agree_with_their_definition(form: str, seed: int) -> None:
    rng = random.Random(seed)
    samples = make_samples(rng, rng.randint(1, 6))
    args = make_args(gae_form=form, gamma_token=rng.choice([1.0, 0.9]), lambda_token=rng.choice([1.0, 0.7]))
    data, wanted = run(samples, args), by_hand(samples, args)
    for i, sample in enumerate(samples):
        for j in range(len(sample.mask)):
            advantage, ret = wanted.get((i, j), (0.0, 0.0))
            assert float(data["advantages"][i][j]) == pytest.approx(advantage, abs=1e-5)
            assert float(data["returns"][i][j]) == pytest.approx(ret, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_token_gae_over_the_episode_is_dual_with_one_discount_after_notes_too(seed: int) -> None:
    samples = make_samples(random.Random(seed), 5)
    data = run(samples, make_args(gae_form="token", gamma_token=0.3, lambda_token=0.2))
    same = make_args(gamma_token=0.99, lambda_token=0.95)
    for got, (advantages, _) in zip(data["advantages"], expected(samples, same), strict=True):
        torch.testing.assert_close(got.double(), advantages, atol=1e-5, rtol=0)


def test_an_unknown_form_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gae_form must be one of 'dual', .*'compaction', got 'mc'"):
        run([], make_args(gae_form="mc"))


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
    found, turn = run(one_value, make_args(gae_form=form)), run(one_value, make_args(gae_form="turn"))
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
def test_a_wrong_form_is_refused_before_anything_is_played(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "forms.py").write_text(OWN_FORMS)
    (tmp_path / "broken.py").write_text("def form(")
    with pytest.raises(ConfigError, match=words):
        check_form(path.format(folder=tmp_path))
