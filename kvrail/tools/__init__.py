"""What runs beside a cluster, and what its command line starts."""
