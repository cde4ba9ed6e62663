"""The plugin's hooks on one CPU machine: engine, trainer, tiny policy."""
