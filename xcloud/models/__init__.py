"""Half of the layer "task" of the paper: networks, and where they can be cut."""
