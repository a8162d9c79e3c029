"""Tools: what a client offers, how a model's template shows it, and the calls that a model writes."""
