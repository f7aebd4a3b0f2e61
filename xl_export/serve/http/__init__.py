"""The server as clients see it: OpenAI's interface, streams, scoring, a page, and what operators need."""
