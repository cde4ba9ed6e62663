"""`slime-verlog check --model` prints what a checkpoint's tokenizer and template do, and what they
cannot do."""

import copy
from pathlib import Path
from typing import Any

import pytest

from inspection.command import main
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.families import family


def printed(folder: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> str:
    tokenizer.save_pretrained(folder)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--model", str(folder)])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_profile_of_a_checkpoint_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(tmp_path, family("glm-4.7"), capsys)
    assert (
        "'<|user|>', '<|observation|>', '<|endoftext|>'" in text
        and "it opens the next role" in text
    )
    assert "<arg_key>argument</arg_key>" in text and "the header opens them" in text
    assert "warning" not in text


def test_a_family_that_is_not_listed_gets_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = copy.deepcopy(chatml_tokenizer())
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n", "helper\\n")
    assert "of no family that docs/tokens.md lists" in printed(tmp_path, tokenizer, capsys)


def test_without_target_and_model_the_command_says_what_to_give() -> None:
    with pytest.raises(SystemExit, match="give --model FOLDER"):
        main(["check"])
