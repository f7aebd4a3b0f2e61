"""Reads pickled checkpoints as data: no code in them is ever run."""
