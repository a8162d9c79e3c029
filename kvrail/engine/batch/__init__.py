"""The arrays of one step: its slices, its packed inputs, and what is read back from the device."""
