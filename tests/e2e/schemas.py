"""A hundred schemas of all kinds: nested, recursive, enums, patterns, numbers, Unicode, deep optional fields."""

import random
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "größe", "価格", "a b", 'quo"te', "path/to", "emoji😀", "x-1", "type", "$ref", "properties", "enum")
PATTERNS = (
    "^[a-z]{1,6}$",
    "^[A-Z]{2}-[0-9]{2,4}$",
    "^(red|green|blue)( light)?$",
    "^[0-9]{4}-(0[1-9]|1[0-2])$",
    "^#[0-9a-f]{6}$",
    "^.{0,5}$",
    "[0-9]",
)
RECURSIVE: list[Schema] = [
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["a", "b"]},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["name", "children"],
        "additionalProperties": False,
    },
    {
        "$ref": "#/$defs/json",
        "$defs": {
            "json": {
                "anyOf": [
                    {"type": "null"},
                    {"type": "boolean"},
                    {"type": "array", "items": {"$ref": "#/$defs/json"}, "maxItems": 3},
                ]
            }
        },
    },
]


def scalar(rng: random.Random) -> Schema:
    """A schema of a value without parts."""
    low = rng.randint(-1000, 1000)
    kinds: list[Schema] = [
        {"type": "string", "maxLength": rng.randint(0, 8)},
        {"type": "string", "minLength": 2, "maxLength": 6},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
        {"type": "integer", "exclusiveMinimum": low},
        {"type": "number", "minimum": low, "maximum": low + 7.5},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": rng.sample([*WORDS, 0, -1.5, None, True, [], {"a": 1}], 3)},
        {"const": rng.choice([*WORDS, 42])},
        {"type": ["string", "null"], "maxLength": 4},
        {"type": "integer", "multipleOf": rng.choice([2, 5, 10])},
    ]
    return rng.choice(kinds)


def schema(rng: random.Random, depth: int) -> Schema:
    """A schema of at most so many levels."""
    if not depth or rng.random() < 0.25:
        return scalar(rng)
    match rng.randrange(4):
        case 0:
            least = rng.randint(0, 2)
            return {"type": "array", "items": schema(rng, depth - 1), "minItems": least, "maxItems": least + 2}
        case 1:
            return {"anyOf": [schema(rng, depth - 1), scalar(rng)]}
        case 2:
            parts = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    names = rng.sample(WORDS, rng.randint(1, 4))
    own: Schema = {"type": "object", "properties": {name: schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.8:
        own["additionalProperties"] = False
    return {**own, "required": [name for name in names if rng.random() < 0.6]}


def hundred() -> list[Schema]:
    """The schemas, always the same."""
    rng = random.Random(18)
    return [*RECURSIVE, *(schema(rng, 1 + i % 5) for i in range(100 - len(RECURSIVE)))]
