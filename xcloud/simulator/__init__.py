"""Steps on paper: costs, one simulator, and predictions. Starts nothing and needs no torch."""
