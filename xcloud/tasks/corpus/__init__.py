"""Where sentence pairs come from. Each class reads the visible languages and nothing else."""
