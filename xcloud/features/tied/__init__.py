"""Word embeddings that the first and the last stage of a pipeline share as one matrix."""
