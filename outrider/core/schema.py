"""JSON schemas whose keywords all count. xgrammar ignores some of them silently; then a text may break its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

_NEVER = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # what stands beside one of these is ignored
_TEXT = ("pattern", "format", "minLength", "maxLength")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ARRAY = ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems")
_OBJECT = (
    *("properties", "additionalProperties", "unevaluatedProperties", "propertyNames", "patternProperties"),
    *("required", "minProperties", "maxProperties"),
)
_TYPED = (*_TEXT, *_NUMBER, *_ARRAY, *_OBJECT)
_IMPLIES = ("properties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems", "unevaluatedItems")
_FORMATS = ("date", "time", "date-time", "duration", "email", "uri", "hostname", "ipv4", "ipv6", "uuid")


def unenforced(schema: Any) -> str | None:
    """The first keyword of a schema that would be ignored, and why. None if all count. Found by trial with xgrammar 0.2.8.

    Formats that are not known are notes, as the standard has it. `oneOf` counts as `anyOf`.
    """
    for part in _parts(schema):
        if (found := _ignored(part)) is not None:
            return found
    return None


def _ignored(part: dict[str, Any]) -> str | None:
    for keyword in _NEVER:
        if keyword in part:
            return f"{keyword!r}, which has no effect"
    if part.get("uniqueItems"):
        return "'uniqueItems', which has no effect"
    ref = part.get("$ref")
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        return f"'$ref' to {ref[:80]!r}; only a place in the schema itself can be read, such as '#/$defs/NAME'"
    first = next((k for k in _ALONE if k in part), None)
    beside = next((k for k in (*_TYPED, *_ALONE) if k in part and k != first), None)
    if first is not None and beside is not None:
        return f"{beside!r} beside {first!r}, where it has no effect; move it into the schema that {first!r} gives"
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        return "'allOf' of several schemas, which has no effect; write one schema"
    if "type" not in part and first is None and not any(k in part for k in _IMPLIES):
        lonely = next((k for k in _TYPED if k in part), None)
        if lonely is not None:
            return f"{lonely!r} without 'type', where it has no effect; add the type"
    if "multipleOf" in part and (part.get("type") != "integer" or any(k in part for k in _NUMBER[:4])):
        return "'multipleOf' for numbers or beside a bound, where it has no effect; use it for integers, alone"
    known = part.get("format") if part.get("format") in _FORMATS else None
    length = next((k for k in ("minLength", "maxLength") if k in part), None)
    if length is not None and ("pattern" in part or known is not None):
        return f"{length!r} beside 'pattern' or 'format', where it has no effect"
    if known is not None and "pattern" in part:
        return "'pattern' beside 'format', where it has no effect"
    if "patternProperties" in part and "properties" in part:
        return "'patternProperties' beside 'properties', where it has no effect"
    required, named = part.get("required"), part.get("properties")
    if isinstance(required, list):
        there = cast(dict[str, Any], named) if isinstance(named, dict) else {}
        absent = [r for r in cast(list[Any], required) if isinstance(r, str) and r not in there]
        if absent:
            return f"'required' with {absent[0][:80]!r}, which 'properties' lacks; add it there"
    return None


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and the schemas in it."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        found = cast(dict[str, Any], part)
        yield found
        for keyword, value in found.items():
            if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
                waiting += value.values()
            elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
                waiting += value
            elif keyword in (
                "items",
                "additionalProperties",
                "unevaluatedProperties",
                "unevaluatedItems",
                "propertyNames",
            ):
                waiting.append(value)
