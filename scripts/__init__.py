"""Commands that start training, evaluate and install."""
