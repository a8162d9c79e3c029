"""`kvrail pack` and `kvrail unpack`: a model's folder in fewer bytes, and back to the very same files."""
