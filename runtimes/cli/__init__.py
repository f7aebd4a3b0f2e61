"""The commands that need no PyTorch: one file each."""
