"""Private room of `inspection.report`: reads episodes, measures them, judges the numbers, and writes the report."""
