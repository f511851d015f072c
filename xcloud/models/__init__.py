"""The model half of the paper's task layer: networks and where they can be split."""
