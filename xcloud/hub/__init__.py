"""Access to pretrained checkpoints and public data sets."""
