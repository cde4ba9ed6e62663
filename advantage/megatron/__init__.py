"""What depends on Megatron: parallel layout, exchange between ranks, whitening, framework versions."""
