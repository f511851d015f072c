"""How ranks find each other and agree on what to run."""
