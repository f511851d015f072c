"""A run that ends at the first evaluation that reaches a target score."""
