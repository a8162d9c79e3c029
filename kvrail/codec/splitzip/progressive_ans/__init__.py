"""The entropy-coded form in two stages, the first of which is enough to draft on: for slow links."""
