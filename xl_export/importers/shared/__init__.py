"""What the importers of several formats have in common."""
