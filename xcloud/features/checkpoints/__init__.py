"""Checkpoints, and what a run resumes with."""
