"""What all other folders use: errors, atomic files, records, the machine, progress, how commands start."""
