"""What the quickstart leaves behind, from a run far too short to learn."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")
pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")

from embedded.launch import run_seed
from embedded.run.record import reward_note
from embedded.warmstart.imitation import WarmStart
from slime_verlog import read_settings
from tests.embedded.conftest import ROOT, WARM, small_config


def test_a_run_writes_summary_and_metrics(tmp_path: Path) -> None:
    config, out = small_config(tmp_path, eval={"episodes": 5}), tmp_path / "out"
    flags: dict[str, Any] = {
        "rollout_batch_size": 16,
        "global_batch_size": 8,
        "num_critic_only_steps": 1,
        "rollout_max_response_len": 8,
    }
    summary = run_seed(3, out, config, 2, read_settings(WarmStart, WARM), **flags)
    assert json.loads((out / "summary.json").read_text()) == summary
    for key in ("win_rate_before", "win_rate_after"):
        assert set(summary[key]) == {"mean", "se", "n"} and summary[key]["n"] == 5
    assert summary["updates"] == 2 and summary["turns"] == 32 and summary["seed"] == 3
    assert summary["wall_time_s"] > 0 and 0 <= summary["valid_action_ratio_after"] <= 1
    assert not list(out.glob(".*"))
    for page in ("quickstart", "studies"):  # name every file, and no other
        table = re.findall(
            r"^\| (`.+?`) \|", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE
        )
        named = {name.strip("/") for cell in table for name in re.findall("`(.+?)`", cell)}
        assert named == {path.name for path in out.iterdir()}, page


def test_one_batch_says_nothing_about_rewards_that_never_differ() -> None:
    rows = [{"turn/reward": 0.25}] * 2
    assert reward_note(rows[:1]) is None and reward_note([rows[0], {"turn/reward": 0.5}]) is None
    assert "every batch paid the same mean reward, 0.25 per turn" in str(reward_note(rows))
