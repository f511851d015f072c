"""What a run reports, while it runs and after."""
