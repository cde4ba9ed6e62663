"""The text of an experiment's YAML, with its comments, as a run uses it."""

import re

from scripts.launcher.own_python import ROOT
from slime_verlog import ConfigError

HYBRID = re.compile(r"Qwen3(\.\d+)?-[\d.]+B(-A[\d.]+B)?(-FP8|-AWQ|-GPTQ-Int[48])?")
"""Models that think by default, which no response length here fits; Instruct, Thinking, Coder and
Next are others."""


def read_config(config: str, model: str) -> str:
    """Return the text of a YAML, without thoughts of a hybrid model; raises ConfigError if there is
    no such file."""
    path = ROOT / config
    if not path.is_file():
        raise ConfigError(
            f"no CONFIG={config}; give a YAML file, as an absolute path or relative to {ROOT}"
        )
    text = path.read_text(encoding="utf-8").rstrip("\n")
    return (
        with_key(text, "chat_template_kwargs", "{enable_thinking: false}")
        if HYBRID.fullmatch(model)
        else text
    )


def with_key(text: str, key: str, value: str) -> str:
    """Append a key to a YAML text, unless it has the key."""
    return text if re.search(f"(?m)^{key}:", text) else f"{text}\n{key}: {value}"


def without_key(text: str, key: str) -> str:
    """Remove a key and the indented lines below it from a YAML text."""
    return re.sub(rf"(?m)^{key}:.*\n?(?:[ \t].*\n?)*", "", text).rstrip("\n")
