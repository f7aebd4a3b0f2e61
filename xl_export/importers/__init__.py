"""Reads checkpoints of other projects without running anything that they contain."""
