"""Lynx: KV in a coarse stage of four bits a value, a stage of four more, and one that restores every bit."""
