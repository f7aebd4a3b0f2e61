"""What an artefact promises, and what a session that runs it must do. Nothing here computes a step."""
