"""Many runs that belong together: sweeps and searches, their tables and pictures."""
