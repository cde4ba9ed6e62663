"""The rooms of `slime-verlog export`: which episodes, as which rows or trajectories, into which files."""
