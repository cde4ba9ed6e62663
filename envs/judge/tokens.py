"""Encodes the judge's conversation for SGLang's `/generate`, and asks a server which model and tokenizer it uses."""

from __future__ import annotations

import functools
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from envs.errors import ConfigError, JudgeError
from envs.plain_text import PlainText


class JudgeTokenizer:
    """The judge's tokenizer with its chat template.

    Raises:
        ConfigError: the folder holds no tokenizer, or the tokenizer has no chat template.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            template = self._tokenizer.get_chat_template()
        except (OSError, ValueError) as error:
            raise ConfigError(f"env.judge.tokenizer: {folder} lacks a tokenizer or chat template: {error}") from error
        self._text = PlainText(self._tokenizer, template)

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of the conversation and of the header for the answer; message contents never become control tokens."""
        from jinja2.exceptions import TemplateError

        marks: dict[str, str] = {}
        shown = [{**message, "content": self._text.stand_ins(message["content"], marks)} for message in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(
                f"env.judge.tokenizer: the chat template refuses the judge's conversation: {error}; serve the judge "
                "with another chat template, or use api: openai"
            ) from error
        return self._text.join([self._text.template_text(rendered, {ord(mark): text for text, mark in marks.items()})])


load_tokenizer = functools.lru_cache(maxsize=4)(JudgeTokenizer)


@functools.lru_cache(maxsize=4)
def served_tokenizer(url: str) -> str:
    """Folder of the tokenizer that an SGLang server reports.

    Raises:
        JudgeError: the server reports none.
    """
    info = ask_server(f"{url}/get_model_info", 10.0)
    found = info.get("tokenizer_path") or info.get("model_path") if isinstance(info, dict) else None
    if not isinstance(found, str):
        raise JudgeError(f"{url}/get_model_info names no tokenizer; set env.judge.tokenizer")
    return found


def served_model(url: str, api: str, headers: dict[str, str], seconds: float) -> str | None:
    """The model that a server reports, or None."""
    try:
        if api == "sglang":
            found = ask_server(f"{url}/get_model_info", seconds, headers)["model_path"]
        else:
            found = ask_server(f"{url}/v1/models", seconds, headers)["data"][0]["id"]
    except (JudgeError, KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, str) else None


def ask_server(address: str, seconds: float, headers: dict[str, str] | None = None) -> Any:
    """The JSON at an address.

    Raises:
        JudgeError: it cannot be read.
    """
    try:
        request = urllib.request.Request(address, headers=headers or {})
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.load(response)
    except (OSError, ValueError) as error:
        raise JudgeError(f"{address} cannot be read ({error}); set env.judge.tokenizer") from error
