"""Cases that serve or score with several processes."""
