"""Steps in which other programs than the one of the step open an engine."""
