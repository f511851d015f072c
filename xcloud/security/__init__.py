"""Layer "security and privacy" of the paper: what a cloud may hold."""
