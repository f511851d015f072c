"""What a rank does: its role, its loop, its evaluation."""
