"""Measures what other clouds could recover from what crossed to them."""
