"""Learns from preferences, against what the model of the start says of the same answers."""
