"""Trip: decisions at the start that pay at the end, over as many turns as you like."""

from envs.trip.env import DEFAULT_TASK, SETTINGS, Trip, build_env, expert_action, explain_action

__all__ = ["DEFAULT_TASK", "SETTINGS", "Trip", "build_env", "expert_action", "explain_action"]
