"""The earlier place of `envs.calls`, for environments that import it from here."""

from envs.calls import CLOSE, OPEN, Call, Calls, find_calls, reasoning_end

__all__ = ["CLOSE", "OPEN", "Call", "Calls", "find_calls", "reasoning_end"]
