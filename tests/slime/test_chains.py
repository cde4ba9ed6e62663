"""slime's own train.py over two ranks: samples of chains train what a sample per turn trains, with
fewer tokens."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags, roles
from tests.slime.cpu.harness import Run

pytestmark = pytest.mark.slow

ROLLOUTS = 2
Numbers = dict[tuple[int, ...], torch.Tensor]


LAYOUTS = {
    "per turn": "",
    "per token": "--calculate-per-token-loss",
    "two pipeline stages": "--pipeline-model-parallel-size 2",
}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def runs(
    request: pytest.FixtureRequest, make_run: Callable[..., Run], engine: EngineServer, ground: Any
) -> list[Run]:
    """The same conversations with a sample per turn, then per chain, in float32."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIME_CPU_FP32", "1")
        for samples in ("turns", "chains"):
            name = f"{samples}{len(request.param)}"
            run = make_run(
                name,
                *engine_flags(engine),
                request.param,
                f"--num-rollout {ROLLOUTS} --normalize-advantages --kl-coef 0.1",
                "--rollout-function-path tests.slime.cpu.conversations.generate_rollout",
                *roles(ground / name / "roles.yaml", {"lr": 5e-3}, {"lr": 1e-3}),
                # Adam makes whole steps of gradients that are rounding errors alone, unless its
                # epsilon is above these.
                "--max-tokens-per-gpu 64 --adam-eps 1e-4",
                gpus=2,
                samples=samples,
            )
            run.train()
            found.append(run)
    return found


@pytest.mark.parametrize("column", ["values", "returns", "advantages", "log_probs"])
@pytest.mark.parametrize("rollout", range(ROLLOUTS))
def test_every_turn_gets_the_same_numbers(runs: list[Run], rollout: int, column: str) -> None:
    """In the second rollout, values and log-probs are those of models that the first one
    trained."""
    alone, joined = (_of_turns(run.records("actor", rollout), column) for run in runs)
    assert alone.keys() == joined.keys() and len(alone) > 8
    for turn, numbers in alone.items():
        torch.testing.assert_close(joined[turn], numbers, atol=2e-5, rtol=0)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_chains_have_fewer_tokens_and_slime_makes_as_many_steps(runs: list[Run], role: str) -> None:
    for rollout in range(ROLLOUTS):
        alone, joined = ([record["data"] for record in run.records(role, rollout)] for run in runs)
        tokens = [
            sum(len(row) for data in some for row in data["tokens"]) for some in (alone, joined)
        ]
        assert tokens[1] < 0.7 * tokens[0]
        assert [len(data["num_microbatches"]) for data in alone] == [
            len(data["num_microbatches"]) for data in joined
        ]


@pytest.mark.parametrize("metric", ["grad_norm", "pg_loss", "ppo_kl", "value_loss"])
def test_slime_logs_the_same_losses_and_norms(runs: list[Run], metric: str) -> None:
    alone, joined = (_logged(run, metric) for run in runs)
    assert len(alone) >= 2 * ROLLOUTS and alone == pytest.approx(joined, rel=2e-4, abs=2e-5)


def _logged(run: Run, metric: str) -> list[float]:
    return [
        float(x)
        for x in re.findall(
            rf"'[\w/-]*{metric}': (-?[\d.e-]+)", run.log.read_text(errors="replace")
        )
    ]


def _of_turns(records: Any, column: str) -> Numbers:
    """A column's numbers at the tokens of each trained turn, which its tokens up to its end
    name."""
    found: Numbers = {}
    for data in (record["data"] for record in records):
        if column not in data:  # an earlier pipeline stage
            continue
        for tokens, mask, numbers in zip(
            data["tokens"], data["loss_masks"], data[column], strict=True
        ):
            edges = torch.cat([torch.zeros(1), mask.float(), torch.zeros(1)]).diff()
            starts, ends = (
                (edges == 1).nonzero()[:, 0].tolist(),
                (edges == -1).nonzero()[:, 0].tolist(),
            )
            for start, end in zip(starts, ends, strict=True):
                whole = tokens[: len(tokens) - len(mask) + end]
                found[tuple(whole.tolist())] = numbers[start:end]
    return found
