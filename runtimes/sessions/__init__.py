"""Who computes a step: one session class for each runtime, and the function that opens the right one."""
