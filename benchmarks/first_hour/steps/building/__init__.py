"""Steps that only build engines: for every GPU ahead of time, and with each option of a build."""
