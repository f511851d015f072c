"""The training of one rank: its loop over updates, and what it builds."""
