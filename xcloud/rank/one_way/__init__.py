"""Ranks of a one-way job."""
