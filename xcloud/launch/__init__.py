"""Starting a run and its processes."""
