"""The schedule that drains no pipeline between updates: its gradients are one update old."""
