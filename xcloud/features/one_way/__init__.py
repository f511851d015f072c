"""Jobs whose clouds send to another and get nothing back."""
