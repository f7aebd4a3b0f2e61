"""The steps of the first hour: each module has the function of one or several steps."""
