"""Layer "parallel computing" of the paper: who computes what, and when."""
