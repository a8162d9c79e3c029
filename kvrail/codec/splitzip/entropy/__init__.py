"""The code in one stage, its codes entropy-coded by rANS: for slow links."""
