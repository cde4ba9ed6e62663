"""Text that the judge is shown and others wrote: quoted, and without anything that reads as a control token.

An endpoint that takes messages as text applies its chat template to them, and `<|im_end|>` inside an answer would end
the message there. The openai API leaves no way to send tokens, so the text itself must not hold such strings.
"""

from __future__ import annotations

import json
import re
from typing import Any

from envs.tools.results import encodable

_OPENING = re.compile(r"[<\[](?=\S)|\](?=~)")
"""Where control tokens of today's model families begin: `<|im_end|>`, `</s>`, `<｜User｜>`, `[INST]`, `]~b]`."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def quoted(value: Any) -> str:
    """The value as JSON with the same meaning: `<` and `[` before other text are escaped inside its strings."""
    written = encodable(json.dumps(value, ensure_ascii=False))
    return _STRING.sub(lambda string: _OPENING.sub(lambda c: f"\\u{ord(c.group()):04x}", string.group()), written)


def broken(text: str) -> str:
    """The text with a space after every character that may open a control token."""
    return _OPENING.sub(lambda c: f"{c.group()} ", encodable(text))
