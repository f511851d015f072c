"""Speed against peers and against the physical limit. Each file is a command; none is imported
by the package."""
