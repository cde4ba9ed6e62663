"""Crafter's world without pictures: the rules of the package `crafter`, its random draws, and BALROG's words."""
