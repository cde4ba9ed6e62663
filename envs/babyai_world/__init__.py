"""Parts of `envs.babyai` that need minigrid: levels, the agent's view, and a scripted player."""
