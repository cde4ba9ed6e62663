"""Tells what `--player` names: a scripted player, a model's folder, an SGLang address or an OpenAI-compatible one."""

from __future__ import annotations

import difflib
import enum
import hashlib
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from envs.loading import load_env_module
from inspection.evaluate.sweep import Point
from slime_verlog import ConfigError

SCRIPTED = ("random", "expert")
CHAT = "/chat/completions"


class Kind(enum.StrEnum):
    """How a player is asked."""

    SCRIPTED = "scripted"
    """Beside the environment, without a model."""
    FOLDER = "folder"
    """The embedded engine serves a Hugging Face folder on this machine."""
    SGLANG = "sglang"
    """`/generate` of an engine or router."""
    CHAT = "chat"
    """`/chat/completions` of an OpenAI-compatible endpoint."""


@dataclass(frozen=True)
class Contestant:
    """The player of a run."""

    kind: Kind
    name: str
    """As the records show it."""
    source: str
    """Name of a scripted player, folder or address."""
    tokenizer: str = ""
    """Folder with the tokenizer, unless the player reads messages."""

    def identity(self, options: Namespace) -> dict[str, Any]:
        """What must be equal for two runs to have the same player."""
        source = re.sub("//[^/@]*@", "//", self.source)  # without a password
        found = {"kind": str(self.kind), "name": self.name, "source": source}
        if self.kind is Kind.SCRIPTED:
            return found
        found |= {"temperature": options.temperature, "max_response_len": options.max_response_len}
        if self.kind is Kind.CHAT:
            return found
        found |= {"max_context_len": options.max_context_len, "tokenizer": self.tokenizer}
        if self.kind is Kind.FOLDER:
            found |= {"seed": options.seed, "weights": _fingerprint(Path(self.source))}
        return found


def read_player(options: Namespace) -> Contestant:
    """The player that `--player` names.

    Raises:
        ConfigError: there is no such player, or an option that it needs is missing.
    """
    given = options.player
    if given in SCRIPTED:
        return Contestant(Kind.SCRIPTED, given, given)
    if "://" in given:
        return _at_address(given, options)
    folder = Path(given).expanduser()
    if not folder.is_dir():
        near = difflib.get_close_matches(given, SCRIPTED, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--player must be random, expert, a model's folder or an address, got {given!r}{hint}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--player {given} is not a Hugging Face folder: it has no config.json")
    name = folder.resolve().name
    return Contestant(Kind.FOLDER, name, str(folder.resolve()), str(folder))


def _at_address(given: str, options: Namespace) -> Contestant:
    address = urlparse(given)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"--player must look like http://HOST:PORT or https://HOST/v1, got {given!r}")
    url = given.rstrip("/")
    if url.endswith(("/v1", CHAT)):
        if not options.model:
            raise ConfigError(f"an OpenAI-compatible address needs the model's name: give --model NAME with {given}")
        return Contestant(Kind.CHAT, options.model, url.removesuffix(CHAT))
    if not options.tokenizer:
        raise ConfigError(
            f"{given} is asked with token ids (/generate): give --tokenizer FOLDER with the model's tokenizer. For an "
            "OpenAI-compatible endpoint, the address must end in /v1 or /chat/completions"
        )
    name = options.model or address.netloc.rpartition("@")[2]
    return Contestant(Kind.SGLANG, name, url, str(Path(options.tokenizer).expanduser()))


def check_experts(points: Sequence[Point]) -> None:
    """Check that every environment has an expert.

    Raises:
        ConfigError: names the module without one.
    """
    for path in {spec.env.env_path for point in points for spec in point.episodes.values()}:
        if not hasattr(load_env_module(path), "expert_action"):
            raise ConfigError(f"{path} has no function expert_action(env), so there is no expert to play it")


def _fingerprint(folder: Path) -> str:
    """Changes when a file of the model changes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
