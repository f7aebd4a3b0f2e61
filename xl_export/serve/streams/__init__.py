"""The streams that a server keeps, in one SQLite database."""
