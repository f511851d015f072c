"""Layer "training optimisation" of the paper: what one rank does with its parameters."""
