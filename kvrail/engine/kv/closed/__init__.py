"""Pools of closed pages of every form, and what a device does with them."""
