"""Write a run's weights for workers elsewhere, patch by patch; keep a folder current there."""
