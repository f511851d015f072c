"""Use what was trained."""
