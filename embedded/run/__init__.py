"""One run: its folder, its metrics and alarms, its report."""
