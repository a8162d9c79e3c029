"""SplitZip: floating-point KV with its exponents in fixed-width codes and the rare others in an escape stream."""
