"""Parts of `envs.textworld`: themes and recipes, building and caching of games, and playing one game."""
