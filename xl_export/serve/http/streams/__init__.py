"""Streams that clients keep on the server: `/v1/streams`."""
