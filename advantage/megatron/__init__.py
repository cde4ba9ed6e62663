"""Megatron's side: parallel layout, exchange between ranks, whitening, framework versions."""
