"""Whitening has mean 0 and variance 1 over trained tokens; Verlog's recorded advantages are
reproduced."""

import pytest
import torch

from advantage.exchange import Group
from advantage.training.losses import whiten
from tests.conftest import load_recording


def test_a_batch_without_trained_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no token of this batch is trained"):
        whiten([torch.ones(2)], [torch.zeros(2)], Group())


@pytest.mark.parametrize("case", [0, 1])
def test_whitening_reproduces_verlogs_recorded_advantages(case: int) -> None:
    record = load_recording("verlog_gae.json.gz")[case]
    rows, masks, wanted = (
        torch.tensor(record[k]) for k in ("advantages_raw", "mask", "advantages_whitened")
    )
    white = torch.stack(whiten(list(rows), list(masks), Group()))
    torch.testing.assert_close(white, wanted, atol=1e-5, rtol=1e-5)
