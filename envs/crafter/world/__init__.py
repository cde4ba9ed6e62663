"""Crafter's world without rendering."""
