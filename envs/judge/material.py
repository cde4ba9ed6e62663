"""Removes control strings from untrusted text that is shown to the judge.

A server that receives messages as text applies its chat template to them, so `<|im_end|>` inside an answer would end
the message there. The OpenAI API cannot take tokens, so the text itself must not contain such strings.
"""

from __future__ import annotations

import json
import re
from typing import Any

from envs.tools.results import encodable

_OPENING = re.compile(r"[<\[](?=\S)|\](?=~)")
"""Start of a control token in known model families: `<|im_end|>`, `</s>`, `<｜User｜>`, `[INST]`, `]~b]`."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def quoted(value: Any) -> str:
    """The value as JSON; inside its strings, `<` and `[` before other text are escaped."""
    written = encodable(json.dumps(value, ensure_ascii=False))
    return _STRING.sub(lambda string: _OPENING.sub(lambda c: f"\\u{ord(c.group()):04x}", string.group()), written)


def broken(text: str) -> str:
    """The text with a space after every character that may begin a control token."""
    return _OPENING.sub(lambda c: f"{c.group()} ", encodable(text))
