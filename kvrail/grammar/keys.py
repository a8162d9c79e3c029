"""Bounds the keys of objects: how many an object has, and that no key is repeated without end.

llguidance allows each named property once. A key that only a pattern or `additionalProperties` allows may come any
number of times, and a weak model may then repeat it until it is cut off.
"""

import math
import re
from itertools import combinations
from typing import Any

from kvrail.errors import InvalidRequestError
from kvrail.grammar.closing import Json, least_of, within

MAX_PATTERNED = 64
"""Properties of an object with `patternProperties` whose schema has no `maxProperties`."""
MAX_COMBINATIONS = 64
"""Ways to choose the properties that an object must have, where their number is given and not their names."""
_KEYS = re.compile(r"\^(?:([\w-]+)|\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\))\$")
"""A pattern that is a list of keys."""


def named(schema: Any) -> Any:
    """`schema` with properties where its patterns only list keys, such as ^a$ or ^(a|b)$."""
    if not isinstance(schema, dict):
        return schema
    changed = within(schema, named)
    patterns, properties = changed.get("patternProperties"), changed.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return changed
    found = [(_KEYS.fullmatch(pattern), each) for pattern, each in patterns.items()]
    keys = [(key, each) for match, each in found if match for key in (match[1] or match[2]).split("|")]
    names = [*properties, *(key for key, _ in keys)]
    if not all(match for match, _ in found) or len(set(names)) < len(names):
        return changed
    del changed["patternProperties"]
    return {**changed, "properties": {**properties, **dict(keys)}}


def counted(schema: Any, *, lenient: bool) -> Any:
    """`schema` with bounds on the number of properties that llguidance can keep.

    lenient: ignore a least number that cannot be kept. Raises InvalidRequestError where there are no such bounds.
    """
    if not isinstance(schema, dict):
        return schema
    changed = within(schema, lambda each: counted(each, lenient=lenient))
    properties, required = changed.get("properties", {}), changed.get("required", [])
    if not isinstance(properties, dict) or not _is_names(required):
        return changed
    optional = [name for name in properties if name not in required]
    if changed.get("patternProperties"):
        if optional:
            raise InvalidRequestError(
                "'patternProperties' beside properties that are optional: keys could repeat without end; require "
                f"{optional[0][:80]!r} and the others, or leave the patterns out"
            )
        changed = {"maxProperties": max(MAX_PATTERNED, least_of(changed)), **changed}
    return _at_least(changed, required, optional, lenient=lenient)


def _is_names(required: Any) -> bool:
    return isinstance(required, list) and all(isinstance(name, str) for name in required)


def _at_least(schema: Json, required: list[str], optional: list[str], *, lenient: bool) -> Json:
    """`schema` with a least number of properties that llguidance can keep: unchanged, or with that many required."""
    least = least_of(schema)
    missing = least - len(set(required))
    without = {key: value for key, value in schema.items() if key != "minProperties"}
    if missing <= 0:
        return without
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if least == 1 or (not closed and missing == 1) or (closed and missing > len(optional)):
        return schema
    if closed and "anyOf" not in schema and math.comb(len(optional), missing) <= MAX_COMBINATIONS:
        return {**without, "anyOf": [{"required": [*required, *some]} for some in combinations(optional, missing)]}
    if not lenient:
        raise InvalidRequestError(
            f"'minProperties' of {least} cannot be enforced where {missing} of the keys are left open; "
            "require more properties by name"
        )
    return without if closed else schema
