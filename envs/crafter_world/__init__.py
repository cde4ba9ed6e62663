"""Parts of `envs.crafter`: Crafter's world without rendering, its text and pictures, and a scripted player."""
