"""Pure functions of tensors: no process group, no framework."""
