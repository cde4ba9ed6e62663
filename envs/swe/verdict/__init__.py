"""Whether a task is solved: test runs out of the agent's reach, and counter-tests that must fail."""
