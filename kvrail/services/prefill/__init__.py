"""The prefill worker: computes prompts and streams first tokens and KV pages to decode workers."""
