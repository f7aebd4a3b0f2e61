"""The attention kernels of an engine, in Triton: compiled, launched and tried."""
