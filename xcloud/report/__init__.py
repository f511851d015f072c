"""What a person sees of runs: the live line, the closing table, pictures, MLflow's pages."""
