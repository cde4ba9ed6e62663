"""The rooms of `slime-verlog evaluate` and `slime-verlog compare`."""
