"""Parts of `envs.babaisai`: pieces, rules, the world's law, levels, their words and picture, and a planner."""
