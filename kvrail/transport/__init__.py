"""How KV frames cross from a prefill to a decode worker; frames are opaque here."""
