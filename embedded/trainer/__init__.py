"""PPO on Megatron-core, on one device, CPU included."""
