"""What starts runs: the parts that all kinds share, and the kinds other than PPO."""
