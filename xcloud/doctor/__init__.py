"""`python -m xcloud doctor`: whether a cloud can take part in a run, before money is spent."""
