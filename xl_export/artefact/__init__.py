"""Run to artefact: export, validation against PyTorch, and what a precision costs."""
