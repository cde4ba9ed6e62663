"""Environments in threads, processes or Ray actors, which are replaced when they fail."""
