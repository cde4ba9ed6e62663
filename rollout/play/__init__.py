"""Plays episodes: the loop, live episodes, their prompts and memory, and the engine client."""
