"""ARTEFACT → engine for NVIDIA GPUs: the operator that the step graph calls, its kernel, and what builds with
them.
"""
