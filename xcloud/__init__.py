"""Train language models whose parts sit in different clouds joined by a slow link."""

__version__ = "0.1.0"
