"""Half of the layer "task" of the paper: what is learned, and how it is scored."""
