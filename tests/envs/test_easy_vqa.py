"""Questions about small pictures, with the package's own data."""

import pytest

from envs.loading import build_env_from

pytest.importorskip(
    "easy_vqa", reason="easy-vqa is not installed; pip install easy-vqa==1.0 enables this test"
)


def test_a_question_comes_with_its_picture_and_a_wrong_answer_may_be_corrected() -> None:
    env = build_env_from("envs.easy_vqa", {"task": "train", "seed": 5})
    first = env.reset()
    (picture,) = first["multi_modal_data"]["current_image"]
    assert picture.size == (64, 64) and picture.mode == "RGB"
    assert "teal" in env.instruction_prompt and env.question.text.endswith("?")
    observation, done, info = env.step("Answer: purple")
    assert not done and "wrong" in observation["obs_str"]
    assert observation["multi_modal_data"]["current_image"] == [picture]
    _, done, info = env.step(f"Answer: {env.question.answer}")
    assert done and info["reward"] == 1.0
