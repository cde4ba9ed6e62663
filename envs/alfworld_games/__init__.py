"""ALFWorld's parts: games of its data set, demo games built from its grammar, and how one game is played."""
