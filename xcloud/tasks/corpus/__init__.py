"""Readers of text corpora. Each reads only the visible columns."""
