"""Copies of a pipeline in several clouds: strategies, averaging, merges."""
