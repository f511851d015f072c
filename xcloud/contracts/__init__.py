"""Contracts between rooms that do not know each other: what tasks, models and one-way parts offer,
and what whoever runs them may ask. Protocols and plain data only."""
