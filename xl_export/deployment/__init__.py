"""Artefacts and engines in the layouts of other people's tools: servers, and tools that compare runtimes."""
