"""Whether a task is solved: probes and tests that run out of the agent's reach."""
