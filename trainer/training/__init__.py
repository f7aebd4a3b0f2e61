"""The training loop and what it needs: state, objective, optimiser, schedule, validation, processes."""
