"""Differential privacy: what it does to gradients, and what it guarantees in the end."""
