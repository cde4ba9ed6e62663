"""The one reader of YAML: what is not a settings file is refused in one sentence."""

from pathlib import Path

import pytest

from rollout.bridge.settings import read_value
from slime_verlog import ConfigError, read_yaml


def problem(text: str, folder: Path) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_yaml(str(path), "--config")
    said = str(caught.value)
    assert (
        said.startswith(f"--config: {path}")
        and "\n" not in said
        and len(said) < len(str(path)) + 250
    )
    return said.removeprefix(f"--config: {path}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nseed: " + "1" * 5000 + "\n", "is not valid YAML"),
        ("a: 1\nseed: 2\nseed: 3\n", ":3 is not valid YAML: key 'seed' is given twice"),
        ("a: 1\nday: 2026-13-45\n", "is not valid YAML: month must be in 1..12"),
        ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("? [a, b]\n: 1\n", "found unhashable key"),
        ('a: 1\ntask: "a\\ud800b"\n', ":2 is not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    assert words in problem(text, tmp_path)


def test_anchors_aliases_and_merges_of_a_normal_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "base: &base {lr: 1.0e-4, day: 2026-11-23}\nall:\n" + "- {<<: *base, seed: 1}\n" * 300
    )
    content = read_yaml(str(path), "--config")
    assert len(content["all"]) == 300 and content["all"][-1] == {**content["base"], "seed": 1}


@pytest.mark.parametrize("value", ["[1", "2026-13-45"])
def test_a_value_on_the_command_line_is_read_in_the_same_way(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^the value in 'memory.n=.* is not valid YAML: "
    ) as caught:
        read_value(value, f"memory.n={value}")
    assert len(str(caught.value)) < 300
