"""The code of the paper in one exact stage."""
