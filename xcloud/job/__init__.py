"""Layer "management and scheduling": what is to run, as one frozen object."""
