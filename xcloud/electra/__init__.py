"""Multilingual ELECTRA pre-training as a one-way job: several generators feed one discriminator.

Here data, networks and optimizers meet; the networks are models/electra.py, the texts
tasks/multilingual_text.py, the message comm/id_packing.py, the contract parallel/feed_parts.py.
"""
