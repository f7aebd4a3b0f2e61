"""Streams outside of the rows: stored by name, and saved to signed files."""
