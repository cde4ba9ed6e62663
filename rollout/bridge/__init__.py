"""Reads slime's `args` into typed settings, and reads and writes slime's `Sample`."""
