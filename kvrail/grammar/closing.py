"""Closes schemas: an object has only the properties that its schema names, unless the schema mentions others.

A schema that says nothing allows any further property, and a model that is free to write some may never stop. What is
valid under the closed schema is valid under the open one. Where a schema combines parts (allOf, or properties beside
anyOf and the like), closing one part would forbid the properties of another: such a schema is left as it is. So is an
object that must have more properties than its schema names.
"""

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains")
_JOINED = ("allOf", "if", "then", "else", "not", "dependentSchemas", "dependentRequired", "unevaluatedProperties")
_OTHERS = ("additionalProperties", "patternProperties")
_BESIDE = ("anyOf", "oneOf", "$ref")


def closed(schema: Json) -> Json:
    """`schema` with its objects closed; the same where that could change what is valid."""
    return _close(schema) if _can_close(schema) else schema


def _can_close(schema: object) -> bool:
    if not isinstance(schema, dict):
        return True
    if any(key in schema for key in _JOINED):
        return False
    named = schema.get("properties", {})
    if "properties" in schema and any(key in schema for key in _BESIDE):
        return False
    required = schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return False
    if named and any(name not in named for name in required):
        return False
    return all(_can_close(each) for each in _inner(schema))


def _inner(schema: Json) -> list[Any]:
    """The schemas directly within one."""
    maps = [schema[key] for key in _MAPS if isinstance(schema.get(key), dict)]
    lists = [schema[key] for key in _LISTS if isinstance(schema.get(key), list)]
    found = [each for inner in maps for each in inner.values()] + [each for inner in lists for each in inner]
    return found + [schema[key] for key in _SINGLE if key in schema]


def within(schema: Json, change: Callable[[Any], Any]) -> Json:
    """A copy of `schema` in which each schema directly within it is changed."""
    changed = dict(schema)
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            changed[key] = {name: change(each) for name, each in schema[key].items()}
    for key in (*_LISTS, "allOf"):
        if isinstance(schema.get(key), list):
            changed[key] = [change(each) for each in schema[key]]
    for key in _SINGLE:
        if key in schema:
            changed[key] = change(schema[key])
    return changed


def least_of(schema: Json) -> int:
    """The least number of properties that an object must have."""
    least = schema.get("minProperties")
    return least if type(least) is int else 0


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = within(schema, _close)
    named = schema.get("properties")
    if named and least_of(schema) <= len(named) and not any(key in schema for key in _OTHERS):
        changed["additionalProperties"] = False
    return changed
