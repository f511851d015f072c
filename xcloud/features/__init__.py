"""What a job may use beyond a plain pipeline: a folder for each feature."""
