"""PPO on Megatron-core, on one device; a CPU will do."""
