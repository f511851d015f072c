"""What happened in a run: its events and the figures made of them."""
