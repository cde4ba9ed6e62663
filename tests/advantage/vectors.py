"""Writes docs/vectors/*.json: inputs and expected outputs of the formulas, for other projects and
for ours.

    python -m tests.advantage.vectors

The definitions are plain Python, one number at a time. The tests of each formula compare ours with
them.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

from tests.advantage.reference import Turn, brute_force

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"
DISCOUNTS = {"gamma_step": 0.99, "lambda_step": 0.95, "gamma_token": 0.999, "lambda_token": 0.9}


def gae_case(
    rng: random.Random, turns: int, ends: str, notes: bool = False, **discounts: float
) -> dict[str, Any]:
    case: dict[str, Any] = {**DISCOUNTS, **discounts}
    case["turns"] = [
        {"values": [rng.gauss(0, 1) for _ in range(rng.randint(1, 5))], "reward": rng.gauss(0, 1)}
        for _ in range(turns)
    ]
    if notes:
        for k, turn in enumerate(case["turns"]):
            turn["environment_moves"] = k % 2 == 1
    case["bootstrap_value"] = 0.0 if ends == "terminated" else rng.gauss(0, 1)
    case["advantages"] = advantages(case)
    pairs = zip(case["advantages"], case["turns"], strict=True)
    case["returns"] = [
        [a + v for a, v in zip(row, turn["values"], strict=True)] for row, turn in pairs
    ]
    return case


def advantages(case: dict[str, Any]) -> list[list[float]]:
    """GAE over the model's tokens alone: the last token of a turn is followed by the first one of
    the next turn."""
    discounts: dict[str, Any] = {name: case[name] for name in DISCOUNTS}
    if "alpha" in case:
        discounts["lambda_token"] = lambda tokens: max(0.0, 1 - 1 / (case["alpha"] * tokens))
    turns: dict[int, Turn] = {}
    for k, turn in enumerate(case["turns"]):
        no_costs, moves = [0.0] * len(turn["values"]), turn.get("environment_moves", True)
        turns[k] = Turn(
            turn["values"], no_costs, turn["reward"], k + 1, case["bootstrap_value"], moves
        )
    found = brute_force(turns, **discounts)
    return [found[k] for k in turns]


def gae_cases(seed: int, notes: bool = False, **discounts: float) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        gae_case(rng, turns, ends, notes, **discounts)
        for turns in (1, 2, 4)
        for ends in ("terminated", "cut")
    ]


def dis_case(rng: random.Random, low: float, high: float) -> dict[str, Any]:
    log_ratios = [rng.gauss(0, 0.8) for _ in range(8)]
    sizes = [rng.gauss(0, 1) for _ in log_ratios]
    kept = [1 - low < math.exp(x) < 1 + high for x in log_ratios]
    gradient = [-math.exp(x) * a * k for x, a, k in zip(log_ratios, sizes, kept, strict=True)]
    inputs = {"eps_clip": low, "eps_clip_high": high, "log_ratios": log_ratios, "advantages": sizes}
    return {**inputs, "masked": [not k for k in kept], "gradients": gradient}


def hl_gauss_case(
    rng: random.Random, low: float, high: float, bins: int, sigma: float
) -> dict[str, Any]:
    span, centres = high - low, hl_gauss_centres(low, high, bins)
    returns = (low - span, low, low + 0.37 * span, high, high + 0.1 * span)
    tokens = [
        hl_gauss_token(low, high, bins, sigma, y, [rng.gauss(0, 1) for _ in centres])
        for y in returns
    ]
    return {
        "value_range": [low, high],
        "value_bins": bins,
        "value_sigma": sigma,
        "centres": centres,
        "tokens": tokens,
    }


def hl_gauss_centres(low: float, high: float, bins: int) -> list[float]:
    width = (high - low) / (bins - 6)
    return [low + (i - 2.5) * width for i in range(bins)]


def hl_gauss_token(
    low: float, high: float, bins: int, sigma: float, y: float, logits: Sequence[float]
) -> dict[str, Any]:
    """Targets, loss, gradient and value, one bin at a time: 2.5 bins of padding, a clamped
    return."""
    width, centres = (high - low) / (bins - 6), hl_gauss_centres(low, high, bins)
    normal = NormalDist(min(max(y, low), high), sigma * width)
    mass = [normal.cdf(z + width / 2) - normal.cdf(z - width / 2) for z in centres]
    targets = [m / sum(mass) for m in mass]
    total = sum(map(math.exp, logits))
    p = [math.exp(x) / total for x in logits]
    case = {"return": y, "logits": logits, "targets": targets}
    case["loss"] = -sum(t * math.log(x) for t, x in zip(targets, p, strict=True))
    case["gradient"] = [x - t for t, x in zip(targets, p, strict=True)]
    case["value"] = sum(x * z for x, z in zip(p, centres, strict=True))
    return case


def first_token_case(rng: random.Random, mask: list[int], weight: float) -> dict[str, Any]:
    losses = [rng.random() for _ in mask]
    weights = [weight if x and not (j and mask[j - 1]) else 1.0 for j, x in enumerate(mask)]
    trained = [w * loss for w, loss, x in zip(weights, losses, mask, strict=True) if x]
    return {
        "value_first_token_weight": weight,
        "loss_mask": mask,
        "token_losses": losses,
        "loss": sum(trained) / sum(mask),
    }


def vectors() -> dict[str, dict[str, Any]]:
    """Everything that the files hold, by their names."""
    rng = random.Random(7)
    about_gae = (
        "GAE over the model's tokens alone; observation tokens between turns have neither value "
        "nor advantage. values[j] is V before token j, reward is paid at a turn's last token, and "
        "bootstrap_value is V after the last turn."
    )
    return {
        "skip_observation_gae": {
            "about": about_gae,
            "cases": gae_cases(1) + gae_cases(2, gamma_token=1.0, lambda_token=1.0),
        },
        "length_adaptive_lambda": {
            "about": about_gae
            + " lambda_token of a turn with n tokens is max(0, 1 - 1 / (alpha n)).",
            "cases": gae_cases(3, alpha=1.5) + gae_cases(4, alpha=0.5, lambda_step=1.0),
        },
        "compaction_credit": {
            "about": about_gae
            + " After a turn in which the environment did not move, because the model only wrote its "
            "notes, gamma_token and lambda_token replace gamma_step and lambda_step.",
            "cases": gae_cases(5, notes=True),
        },
        "dis": {
            "about": "Double-sided importance sampling: gradients with respect to log pi of each token's loss.",
            "cases": [dis_case(rng, 0.3, 5.0), dis_case(rng, 0.8, 3.0)],
        },
        "hl_gauss": {
            "about": "HL-Gauss. The centres reach 2.5 bins beyond value_range, and returns are clamped to value_range. "
            "gradient is that of the loss with respect to the logits.",
            "cases": [
                hl_gauss_case(rng, 0.0, 1.0, 51, 0.75),
                hl_gauss_case(rng, -6.0, 20.0, 21, 0.5),
            ],
        },
        "first_token_weight": {
            "about": "The value loss of one sample whose trained runs are turns: a mean over trained tokens, in which "
            "each run's first token is weighted and the denominator is not.",
            "cases": [
                first_token_case(rng, [1, 1, 1], 3.0),
                first_token_case(rng, [0, 1, 1, 0, 0, 1, 1, 1], 2.0),
            ],
        },
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in vectors().items():
        cases = ",\n".join(map(json.dumps, content["cases"]))
        text = f'{{"about": {json.dumps(content["about"])},\n"cases": [\n{cases}\n]}}\n'
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
