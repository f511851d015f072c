"""Which link ends a rank holds, and how they are joined."""
