"""Waiting for a place, following a worker's stream, and moving on when a worker is lost."""
