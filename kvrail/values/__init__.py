"""Values that cross processes: sampling parameters, the KV layout, page hashes. Free of torch."""
