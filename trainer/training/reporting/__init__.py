"""What training tells people: lines on the terminal, metrics in the run, events elsewhere."""
