"""A sandbox around one working tree: bubblewrap, resource limits, and the tree seen from
outside."""
