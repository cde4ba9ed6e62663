"""TextWorld's parts: what can be generated, how it is built and cached, and how one game is played."""
