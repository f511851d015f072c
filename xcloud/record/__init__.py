"""What happened in a run: its events, the figures made of them, and the copy in MLflow."""
