"""The first hour on a GPU as one command: `python -m benchmarks first-hour --out report/`."""
