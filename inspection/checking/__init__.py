"""The rooms of `slime-verlog check`: playing an environment, judging what was seen, printing it."""
