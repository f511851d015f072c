"""Where pretrained checkpoints and public data sets come from."""
