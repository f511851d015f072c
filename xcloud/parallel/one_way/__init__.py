"""One-way jobs: clouds that feed one other with integers."""
