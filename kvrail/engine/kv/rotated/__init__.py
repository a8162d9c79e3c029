"""Tiles of values in two bits a value, behind a rotation of their channels."""
