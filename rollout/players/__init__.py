"""Plays episodes in several processes, the players; the manager, slime's own process, keeps the
batch."""
