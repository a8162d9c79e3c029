"""What prefill and decode workers share: the process, budgets, codecs, transports, pages, weights."""
