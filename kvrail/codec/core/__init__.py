"""What codecs share: they import this package and kvrail/codec/base.py, and never each other."""
