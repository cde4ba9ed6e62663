"""Parts of scripts/launch.py, and the programs of scripts that start other kinds of runs."""
