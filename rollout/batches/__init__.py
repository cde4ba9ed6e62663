"""What is made of the turns that were played: the stream, kept batches, saved slots, metrics and
load."""
