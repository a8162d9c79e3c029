"""The workers: discovered, watched, compared, and chosen for each request."""
