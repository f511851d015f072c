"""One matrix that both ends of a pipeline hold."""
