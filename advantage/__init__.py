"""How turns become advantages: pure maths, then the hook into Megatron PPO."""

from advantage.maths.dual_gae import Discounts, dual_discount_gae

__all__ = ["Discounts", "dual_discount_gae"]
