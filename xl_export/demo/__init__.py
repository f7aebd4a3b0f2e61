"""The demo: trained models write and play, and on request a small one is trained."""
