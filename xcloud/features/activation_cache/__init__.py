"""Keeps rows of frozen parts, so that they cross a boundary in the first epoch only."""
