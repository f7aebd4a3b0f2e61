"""One session, one memory of R rows, one thread: which row advances when.

Nothing here knows HTTP or asyncio.
"""
