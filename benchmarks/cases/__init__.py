"""One file a benchmark."""
