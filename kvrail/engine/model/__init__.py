"""A model: found, loaded, checked, probed, and its layers joined or replaced."""
