"""Environments in threads, processes or Ray actors, replaced when they fail."""
