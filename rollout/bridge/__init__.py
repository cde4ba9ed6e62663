"""slime's `args` and `Sample`, read and written here and nowhere else in the rollout."""
