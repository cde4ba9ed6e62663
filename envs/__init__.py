"""Environments for agents: one package each, with `build_env(sample, args)`; here, the interface
and base classes."""
