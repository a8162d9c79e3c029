"""The code in one stage, its codes entropy-coded by a library: for slow links."""
