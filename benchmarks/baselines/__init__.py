"""What the models are measured against: a growing cache, and the Transformer of a sliding window."""
