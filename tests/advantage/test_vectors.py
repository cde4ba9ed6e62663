"""Ours against docs/vectors, which other projects can run too; the files are what plain Python computes."""

import json
from typing import Any

import pytest
import torch

from advantage.hl_gauss import HlGauss
from advantage.hook import compute_advantages
from advantage.settings import ROLE
from advantage.training.losses import first_token_weights
from advantage.training.policy_loss import dis_loss
from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from tests.advantage.batches import FakeSample, make_args, rollout_data
from tests.advantage.vectors import FOLDER, vectors


def test_the_files_are_what_plain_python_computes() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(vectors())
    for name, content in vectors().items():
        written = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert numbers(written) == pytest.approx(numbers(content), abs=1e-12), name


def numbers(content: Any) -> list[float]:
    """All numbers in a file, in order; those of other platforms differ in their last digit."""
    if isinstance(content, dict):
        return numbers(list(content.values()))
    if isinstance(content, list):
        return [number for part in content for number in numbers(part)]
    return [] if isinstance(content, str) else [float(content)]


def cases(name: str) -> list[Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]


def samples(case: dict[str, Any], gap: int) -> list[FakeSample]:
    """The case as one sample whose turns have `gap` masked tokens between them, and the state after a cut."""
    spans, mask, values = [], list[int](), list[float]()
    for turn in case["turns"]:
        start = len(mask)
        mask += [1] * len(turn["values"]) + [0] * gap
        values += turn["values"] + [99.0] * gap
        moves = turn.get("environment_moves", True)
        spans.append(TurnSpan(start, start + len(turn["values"]), turn["reward"], moves=moves))
    over = case["bootstrap_value"] == 0
    rows = [TurnRow(0, 0, terminated=over, turns=tuple(spans)), TurnRow(0, len(spans), TurnKind.BOOTSTRAP)]
    parts = [(rows[0], mask, values)] + ([] if over else [(rows[1], [0], [case["bootstrap_value"]])])
    return [FakeSample(row, 2, m, torch.tensor(v, dtype=torch.float64), torch.zeros(len(m))) for row, m, v in parts]


@pytest.mark.parametrize("name", ["skip_observation_gae", "length_adaptive_lambda", "compaction_credit"])
def test_advantages_and_returns(name: str) -> None:
    for case in cases(name):
        names = ("gamma_step", "lambda_step", "gamma_token", "lambda_token")
        keys: dict[str, Any] = {key: case[key] for key in names}
        if "alpha" in case:
            keys |= {"lambda_policy": "length_adaptive", "lambda_policy_alpha": case["alpha"]}
        args = make_args(**keys, kl_coef=0.0, **{ROLE: "actor"})
        whole = samples(case, gap=2)
        data = rollout_data(whole)
        data["values"] = [sample.values for sample in whole]
        compute_advantages(args, data)
        mask = torch.tensor(whole[0].mask).bool()
        for key in ("advantages", "returns"):
            wanted = [x for row in case[key] for x in row]
            assert data[key][0][mask].tolist() == pytest.approx(wanted, abs=1e-9)


def test_dis() -> None:
    for case in cases("dis"):
        log_probs = torch.tensor(case["log_ratios"], dtype=torch.float64, requires_grad=True)
        sizes = torch.tensor(case["advantages"], dtype=torch.float64)
        loss, masked = dis_loss(-log_probs, sizes, case["eps_clip"], case["eps_clip_high"])
        loss.sum().backward()
        assert log_probs.grad is not None
        assert log_probs.grad.tolist() == pytest.approx(case["gradients"], abs=1e-12)
        assert masked.bool().tolist() == case["masked"]


def test_hl_gauss() -> None:
    for case in cases("hl_gauss"):
        head = HlGauss(*case["value_range"], case["value_bins"], case["value_sigma"])
        assert head.centres(torch.zeros(0, dtype=torch.float64)).tolist() == pytest.approx(case["centres"])
        for token in case["tokens"]:
            logits = torch.tensor(token["logits"], dtype=torch.float64, requires_grad=True)
            returned = torch.tensor(token["return"], dtype=torch.float64)
            loss = head.loss(logits, returned)
            (gradient,) = torch.autograd.grad(loss, logits)
            assert head.targets(returned).tolist() == pytest.approx(token["targets"], abs=1e-12)
            assert gradient.tolist() == pytest.approx(token["gradient"], abs=1e-12)
            assert [loss.item(), head.expectation(logits).item()] == pytest.approx([token["loss"], token["value"]])


def test_first_token_weight() -> None:
    for case in cases("first_token_weight"):
        mask = torch.tensor(case["loss_mask"])
        (weights,) = first_token_weights([mask], case["value_first_token_weight"])
        losses = torch.tensor(case["token_losses"], dtype=torch.float64)
        assert float((weights * losses * mask).sum() / mask.sum()) == pytest.approx(case["loss"])
