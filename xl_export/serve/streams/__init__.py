"""Streams outside of the rows: stored by name, saved to signed files, found by their first tokens."""
