"""The forms in which workers keep KV pages, by the names that settings, messages and requests have for them."""

from typing import Literal, get_args

ExactForm = Literal["plain", "lossless"]
LossyForm = Literal["int8", "int4", "kvcomp", "rot3"]
Asked = Literal["", "exact", ExactForm, LossyForm]
"""What a request may ask for: any form, any exact one, or one by its name."""

EXACT = "exact"
EXACT_FORMS: tuple[str, ...] = get_args(ExactForm)
"""Attention reads every bit that was computed."""
LOSSY_FORMS: tuple[str, ...] = get_args(LossyForm)
FORMS: tuple[str, ...] = (*EXACT_FORMS, *LOSSY_FORMS)


def is_exact(form: str) -> bool:
    """Whether pages of this form keep every bit."""
    return form in EXACT_FORMS


def suits(form: str, asked: str) -> bool:
    """Whether pages of this form serve a request that asks for `asked` (see Asked)."""
    return not asked or form == asked or (asked == EXACT and is_exact(form))
