"""What a critic could explain at the most, measured by playing on from copies of a state."""

import numpy as np
import pytest

from benchmarks.explainable import main, shares


def test_shares_are_those_of_the_process_that_made_the_returns() -> None:
    rng, turns = np.random.default_rng(0), np.arange(4000) % 100
    of_time, of_state, luck = turns / 100 * 12**0.5, rng.normal(size=4000), rng.normal(size=(4000, 8))
    state, time = shares((of_time + of_state)[:, None] + luck, turns.astype(float))
    assert state == pytest.approx(2 / 3, abs=0.03) and time == pytest.approx(1 / 3, abs=0.03)


def test_a_game_without_luck_is_explained_whole(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "env.max_steps=12", "--set", "env.ask_every=4", "--states", "12", "--random-share", "0"]
    main(["custom_configs/recall.yaml", *options])
    assert "12 states: the state explains 1.00 [1.00, 1.00]" in capsys.readouterr().out
