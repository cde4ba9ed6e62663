"""Pure functions of tensors, without process groups or a framework."""
