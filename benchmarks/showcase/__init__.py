"""The demo, and the trained models that it shows."""
