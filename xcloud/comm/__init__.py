"""Layer "communication optimisation" of the paper: fewer bytes for the same meaning."""
