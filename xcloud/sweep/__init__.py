"""Sweeps: many runs that belong together, from the grid of points to tables and pictures."""
