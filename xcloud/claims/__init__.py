"""Published and own figures, each with a command that shows it and a rule that judges it."""
