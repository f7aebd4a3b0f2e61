"""What everything stands on: errors, files that are whole or absent, records, this machine, progress."""
