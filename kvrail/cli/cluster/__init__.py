"""The processes of `kvrail up`: planned, started, watched, and what they print."""
