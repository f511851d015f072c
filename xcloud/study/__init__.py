"""Many runs that belong together: sweeps, claims, records, and the pages made of them."""
