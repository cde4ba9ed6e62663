"""Mixtures: expansion of the YAML's task list, sweeps and unique names."""

from typing import Any

import pytest

from envs.errors import ConfigError
from envs.loading import build_env_from
from envs.mixture import TaskSpec, expand_tasks


def expand(*entries: Any, **defaults: Any) -> list[TaskSpec]:
    return expand_tasks(entries, **{"default_env_path": "envs.babaisai", **defaults})


def test_shared_options_reach_the_default_environment_and_an_entrys_own_win() -> None:
    entries = ({"task": "a", "options": {"max_steps": 9}}, {"env": "envs.babyai", "task": "goto"})
    first, other = expand(*entries, default_options={"max_steps": 5, "vlm": True})
    assert (first.options, other.options) == ({"max_steps": 9, "vlm": True}, {})


def test_a_sweep_becomes_one_named_task_a_combination_and_shares_its_weight() -> None:
    specs = expand(
        {"task": "custom", "weight": 3.0, "sweep": {"rooms": [1, 2, 4], "quest_length": [1, 2]}}
    )
    assert [spec.name for spec in specs][:3] == [
        "custom/rooms=1,quest_length=1",
        "custom/rooms=1,quest_length=2",
        "custom/rooms=2,quest_length=1",
    ]
    assert specs[2].options == {"rooms": 2, "quest_length": 1}
    assert len(specs) == 6 and sum(spec.weight for spec in specs) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"task": "a", "sweep": {"rooms": []}}, "over rooms lists no values"),
        ({"task": "a", "sweep": {"rooms": 3}}, r"tasks\[0\].sweep.rooms must be a list, got 3"),
        (
            {"task": "a", "sweep": {"rooms": [1]}, "options": {"rooms": 2}},
            "rooms both in options and in sweep",
        ),
    ],
)
def test_a_wrong_entry_is_refused_with_its_key_and_the_fix(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(entry)


def test_a_sample_that_names_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="give every entry of tasks its own env"):
        build_env_from("envs.mixture", {"task": "goto", "seed": 0}, {})
