"""See wrong values of the right shape where they arrive from another cloud."""
