"""Scoring a corpus of any size with Ray Data: actors on one machine or on many, resumable after a kill."""
