"""Studies: variants of a setting over several seeds, with a table and a plot."""
