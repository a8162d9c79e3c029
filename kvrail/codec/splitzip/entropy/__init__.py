"""The code in one stage, its codes entropy-coded by zstd or by a rANS of our own: for slow links."""
