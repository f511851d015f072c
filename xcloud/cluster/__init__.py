"""Layer "cloud hardware" of the paper: the clouds as they are, and the links between them."""
