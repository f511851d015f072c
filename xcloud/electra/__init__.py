"""Multilingual ELECTRA pre-training as a one-way job: several generators feed one discriminator.

Combines data, networks and optimizers: networks are in models/electra.py, texts in
tasks/multilingual_text.py, messages in comm/ids.py, protocols in
contracts/one_way_parts.py.
"""
