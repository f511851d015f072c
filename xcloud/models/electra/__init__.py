"""Multilingual ELECTRA pre-training: several generators feed one discriminator, one way."""
