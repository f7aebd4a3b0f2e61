"""The sides of the case `gpu`, and the report of a machine with a GPU."""
