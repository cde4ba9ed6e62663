"""Commands and log hooks that show what a policy does: evaluation tables, metrics, trajectories,
demonstrations."""
