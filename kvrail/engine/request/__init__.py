"""Requests to the engine, their sequences, and the events that it reports."""
