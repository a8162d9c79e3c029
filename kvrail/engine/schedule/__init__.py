"""What the next step computes, and what its outcome means for each request. No kernels."""
