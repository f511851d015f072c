"""Measure, search and apply plans."""
