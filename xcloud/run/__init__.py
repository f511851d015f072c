"""Layer "management and scheduling": ranks at work, and what starts and follows them."""
