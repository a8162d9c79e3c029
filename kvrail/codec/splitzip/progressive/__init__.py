"""Progressive SplitZip: the lossless code in two stages, the first of which is enough to draft on."""
