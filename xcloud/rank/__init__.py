"""What a rank has besides its loop (train/): its context, agreement, reports and evaluation."""
