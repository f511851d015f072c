"""The line between clouds of two owners: keys, sealing, and links over TLS."""
