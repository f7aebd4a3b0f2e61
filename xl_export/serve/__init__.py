"""A server of many live streams.

`core` advances rows, `streams` keeps what is idle, `http` speaks to clients.
"""
