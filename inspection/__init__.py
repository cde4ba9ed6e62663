"""Reading what happened: evaluation tables, turn metrics, the trajectory viewer."""
