"""What may be known where: visibility, policy, noise, and the audit of what left."""
