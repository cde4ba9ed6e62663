"""Studies: variants of one setting over several seeds, with a table and a plot."""
