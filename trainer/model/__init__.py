"""The models of both papers in PyTorch, and the naive attention that everything fast is tested against."""
