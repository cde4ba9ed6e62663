"""Parts of `envs.babaisai`: pieces, rules, world, tasks, levels, text and picture, and a scripted player."""
