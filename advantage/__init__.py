"""Computes advantages from turns: the mathematics, and the hooks into Megatron PPO."""
