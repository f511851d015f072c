"""Access to pretrained checkpoints and public data sets, and a cache of what is made once."""
