"""The entropy-coded form in two stages, for slow links: the first stage is enough to draft on."""
