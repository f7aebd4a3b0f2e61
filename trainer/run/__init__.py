"""A run folder: its configuration, its checkpoint, and the session that computes with it in PyTorch."""
