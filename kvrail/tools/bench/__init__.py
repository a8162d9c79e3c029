"""Measures a server as its clients see it: makes a load, sends it, and reports latencies, throughput and goodput."""
