"""SplitZip: floating-point KV with its exponents in fixed-width codes and the rare others in an escape stream.

`tiles` is what all forms share; `one_stage`, `entropy` and `progressive_ans` are the forms.
"""
