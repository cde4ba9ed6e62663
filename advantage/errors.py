"""Errors of the advantage computation. Each message names the wrong value and what to change."""

from slime_verlog import ConfigError, SlimeVerlogError


class TurnTableError(SlimeVerlogError, ValueError):
    """The turn table is missing, damaged, written by another converter, or does not fit its
    batch."""


class UnsupportedFrameworkError(SlimeVerlogError, RuntimeError):
    """The patch does not support this version of slime."""


class FlagError(ConfigError):
    """A combination of slime's flags that would give wrong advantages. The text names the flag to
    change."""


class OtherRankError(SlimeVerlogError, RuntimeError):
    """Another rank failed, so this rank stops too. The cause is in the other rank's log."""


class NonFiniteLossError(SlimeVerlogError, RuntimeError):
    """A loss is infinite or NaN. The text names it, and what to try."""


class PretrainingError(SlimeVerlogError, RuntimeError):
    """Value pretraining did not give a useful critic. The text says how much it explains."""
