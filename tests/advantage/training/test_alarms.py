"""The alarm names the number, its healthy range and what to do, once each time a metric leaves its
range."""

from typing import Any

import pytest
import torch

from advantage.errors import NonFiniteLossError
from advantage.settings import AdvantageSettings
from advantage.training.alarms import StepAlarm, check_finite, critic_alarm, off_policy_alarm
from slime_verlog import read_settings

GAP, MASKED = "train_rollout_logprob_abs_diff", "pg_clipfrac"


def alarm(**keys: Any) -> StepAlarm:
    return off_policy_alarm(read_settings(AdvantageSettings, {"policy_loss": "dis", **keys}))


def test_it_warns_when_a_metric_leaves_its_range_and_counts_every_step_outside(caplog: Any) -> None:
    watched = alarm(alarm_logprob_abs_diff=0.05)
    gaps = [0.01, 0.05, 0.2, 0.3, 0.01, float("nan")]
    counts = [
        watched.watch({GAP: gap, MASKED: 0.0}, step)["off_policy_alarms"]
        for step, gap in enumerate(gaps)
    ]
    assert counts == [0, 0, 1, 2, 2, 3]
    assert [record.getMessage().split(" in rollout ")[0] for record in caplog.records] == [
        f"the mean difference between the log-probs of trainer and engine ({GAP}) is 0.2",
        f"the mean difference between the log-probs of trainer and engine ({GAP}) is nan",
    ]
    assert (
        "healthy is 0 to 0.05 (alarm_logprob_abs_diff): lower max_staleness or --lr" in caplog.text
    )


@pytest.mark.parametrize(("loss", "metric"), [("dis", "pg_clipfrac"), ("ppo", "tis_clipfrac")])
def test_the_masked_share_is_that_of_the_correction_and_not_ppos_clipping(
    loss: str, metric: str, caplog: Any
) -> None:
    watched = alarm(policy_loss=loss)
    assert watched.watch({metric: 0.3, GAP: 0.0}, 7) == {"off_policy_alarms": 1.0}
    assert "is 0.3 in rollout 7, and healthy is 0 to 0.2 (alarm_masked_share)" in caplog.text
    other = {"pg_clipfrac", "tis_clipfrac"} - {metric}
    assert watched.watch({other.pop(): 0.9, GAP: 0.0}, 8) == {"off_policy_alarms": 1.0}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), torch.tensor(float("-inf"))])
def test_a_loss_that_is_not_finite_stops_training(value: Any) -> None:
    check_finite({"value_loss": 3.0, "ois": float("inf")}, 4)
    with pytest.raises(
        NonFiniteLossError,
        match="value_loss is .* in rollout 4, so training stops: scale the rewards",
    ):
        check_finite({"value_loss": value}, 4)


def test_a_critic_worse_than_a_constant_is_named_after_several_batches_and_a_narrow_range_at_once(
    caplog: Any,
) -> None:
    watched, explained = critic_alarm(), [-0.1] * 4 + [0.2] + [-0.1] * 6
    counts = [
        watched.watch({"explained_variance": x}, k)["critic_alarms"]
        for k, x in enumerate(explained)
    ]
    assert counts == [0] * 9 + [1, 2]
    assert watched.watch({"pg_clipfrac": 1.0}, 0) == {}
    watched.watch({"explained_variance": 0.5, "return_outside_share": 0.3}, 11)
    first, second = (record.getMessage() for record in caplog.records)
    assert (
        "(explained_variance) is -0.1 in rollout 9, and healthy is 0 or more: a constant would "
        "explain 0" in first
    )
    assert "(return_outside_share) is 0.3 in rollout 11, and healthy is 0 to 0.01: " in second
