"""Chooses compression and schedule while a run goes on, as the line changes."""
