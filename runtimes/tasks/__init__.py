"""What one does with a session: evaluate, generate, check, sweep, measure context, describe."""
