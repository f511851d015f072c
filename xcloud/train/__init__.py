"""The training of one rank: its loop over updates, and the one list of features."""
