"""The arrays of one step: its slices, its packed inputs, and the results that are read back from the device."""
