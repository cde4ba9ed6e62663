"""Errors of the advantage side; each text says what is wrong, with which value, and what to change."""

from __future__ import annotations

from slime_verlog import ConfigError, SlimeVerlogError


class TurnTableError(SlimeVerlogError, ValueError):
    """The turn table is missing, foreign, damaged, or does not fit the batch that it came with."""


class UnsupportedFrameworkError(SlimeVerlogError, RuntimeError):
    """The framework, its version or its flags are not ones that the patch can stand behind."""


class FlagError(ConfigError):
    """A combination of the framework's flags under which the advantages would be wrong; names the flag to change."""


class OtherRankError(SlimeVerlogError, RuntimeError):
    """Another rank failed, so this one stops too instead of waiting for it; the other rank's log has the cause."""
