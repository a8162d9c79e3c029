"""Certificates of calls between services, and the file of API keys."""
