"""Parts of the BabyAI environment that need minigrid: levels, what the agent sees, a scripted player."""
