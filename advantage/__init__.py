"""Computes advantages from turns: the mathematics, and the hooks into Megatron PPO."""

from advantage.gae import Discounts, dual_discount_gae

__all__ = ["Discounts", "dual_discount_gae"]
