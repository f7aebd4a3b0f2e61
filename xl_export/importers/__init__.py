"""Checkpoints of other projects, read without running anything that is in them."""
