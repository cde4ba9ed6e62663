"""Builds the images of tasks without a container daemon: Dockerfiles are executed in bubblewrap."""
