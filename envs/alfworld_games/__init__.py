"""Parts of `envs.alfworld`: games of the data set, demo games built from the grammar, and playing one game."""
