"""Who holds which page of the KV cache, and what a page is made of."""
