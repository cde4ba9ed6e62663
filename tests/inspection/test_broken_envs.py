"""A broken environment is refused with one sentence that names the file, the line and the fix."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rollout.bridge.settings import load_settings
from rollout.errors import SlimeVerlogError
from rollout.tasks import try_each_task
from tests.fixtures.broken_envs import BROKEN, WORKING, Broken

WANDERS = "os.chdir('/')\n        return make_observation('start')"


def settings_of(path: Path):
    return load_settings(SimpleNamespace(custom_config_path=str(path)))


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_trial_explains_each_mistake_in_one_sentence(tmp_path: Path, mistake: str) -> None:
    path, sentence = BROKEN[mistake].write(tmp_path)
    with pytest.raises(SlimeVerlogError) as caught:
        try_each_task(settings_of(path))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_numpys_scalars_are_accepted_as_bools_and_numbers(tmp_path: Path) -> None:
    numpy = Broken(
        '"reward": 1.0, "terminated": True, "truncated": False, "valid_action": True,',
        '"reward": np.float32(1), "terminated": np.bool_(True), "truncated": np.bool_(False), '
        '"valid_action": np.array(True),',
        "",
    )
    assert try_each_task(settings_of(numpy.write(tmp_path)[0])) == []
    assert "np.bool_" in (tmp_path / "broken.py").read_text() and "np.bool_" not in WORKING


def test_an_environment_may_change_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file, named relative to the command's folder, is found again at the next episode."""
    wanders = Broken('return make_observation("start")', WANDERS, "")
    path, _ = wanders.write(tmp_path)
    path.write_text(yaml.safe_dump({"rollout_interaction_env_path": "broken.py", "tasks": ["a"]}))
    monkeypatch.chdir(tmp_path)
    assert try_each_task(settings_of(path)) == []
