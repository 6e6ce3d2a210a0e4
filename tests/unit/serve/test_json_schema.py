"""Schemas as the world has them: its test suite through our grammars, and its validator as the judge of what they write."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from functools import lru_cache
from typing import Any

import pytest
from grammars import accepts
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from json_schema_suite import cases, fetch
from jsonschema import Draft202012Validator

from outrider import LLM
from outrider.serve.grammar import Grammar, Grammars

pytest.importorskip("llguidance")


@lru_cache(1)
def small() -> tuple[LLM, Grammars]:
    llm = LLM("builtin:code", max_num_seqs=1)
    return llm, Grammars(llm.tokenizer, 8192, llm.loaded.end_ids)


def taken(schema: Any, document: Any) -> set[bool] | None:
    """Whether the document is, compact and with spaces. None for a schema that is refused."""
    llm, grammars = small()
    texts = [json.dumps(document, ensure_ascii=False, separators=s) for s in ((",", ":"), (", ", ": "))]
    try:
        return {accepts(llm, grammars, Grammar.schema(schema), text) for text in texts}
    except ValueError:
        return None


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.long)])
def test_the_json_schema_test_suite(step: int, request: pytest.FixtureRequest) -> None:
    """A wrong accept is a fault. The wrong rejects are choices: the order of names, formats that are enforced, 1.0 for 1."""
    assert request.config.cache is not None
    try:
        package = fetch(request.config.cache.mkdir("json-schema-suite"))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"the suite cannot be fetched: {error}")
    found, wrong = Counter[str](), list[str]()
    for case in list(cases(package))[::step]:
        answer = taken(case.schema, case.document)
        kind = "refused" if answer is None else "right" if answer == {case.valid} else f"wrong, {case.valid}"
        found[kind] += 1
        if kind == "wrong, False":
            wrong.append(case.name)
    print(dict(found))
    assert wrong == []
    assert found["right"] > found.total() / 2
    if step == 1:
        assert found.total() == 1257
        assert (found["right"] >= 660, found["refused"] <= 575, found["wrong, True"] <= 22) == (True, True, True)


Pair = tuple[dict[str, Any], st.SearchStrategy[Any]]  # a schema and documents that fit it
# DEL is written as \u007f only, which no text here has
LETTERS = st.one_of(
    st.sampled_from('"\\/\t\n\x00é𓀀{}'), st.characters(exclude_categories=["Cs"], exclude_characters="\x7f")
)
NAMES = ["a", "b c", 'd"', "é", "f\\", "long_name"]
VALUES = [None, True, 0, -7, "", 'x"\\\n', "é𓀀", [], [1, "a"], {}, {"a": {"b": None}}]
PATTERNS = {
    r"^[a-c]{2,4}$": ["ab", "cccc"],
    r"\d": ["7", "a1b\n"],
    r"^(\w+@\w+|\s)$": ["x@y", "\t"],
    "^[^a]*$": ["", '"\\'],
}


@st.composite
def leaves(draw: st.DrawFn) -> Pair:
    kind = draw(st.sampled_from(["integer", "number", "string", "pattern", "enum", "const", "boolean", "any"]))
    low, size = draw(st.integers(-50, 50)), draw(st.integers(0, 60))
    if kind == "integer":
        step = draw(st.sampled_from([1, 3]))
        more = {"multipleOf": step} if step > 1 else {}
        fitting = st.integers(-(-low // step), (low + size + step) // step).map(lambda n: n * step)
        return {"type": kind, "minimum": low, "maximum": low + size + step, **more}, fitting
    if kind == "number":
        return {"type": kind, "exclusiveMinimum": low, "maximum": low + 1}, st.sampled_from([low + 0.5, low + 1])
    if kind == "string":
        least, most = draw(st.integers(0, 3)), draw(st.integers(3, 8))
        return {"type": kind, "minLength": least, "maxLength": most}, st.text(LETTERS, min_size=least, max_size=most)
    if kind == "pattern":
        pattern = draw(st.sampled_from(sorted(PATTERNS)))
        return {"type": "string", "pattern": pattern}, st.sampled_from(PATTERNS[pattern])
    if kind == "enum":
        values = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=4))
        return {"enum": values}, st.sampled_from(values)
    if kind == "const":
        value = draw(st.sampled_from(VALUES))
        return {"const": value}, st.just(value)
    return ({"type": "boolean"}, st.booleans()) if kind == "boolean" else ({}, st.sampled_from(VALUES))


@st.composite
def larger(draw: st.DrawFn, parts: st.SearchStrategy[Pair]) -> Pair:
    kind = draw(st.sampled_from(["array", "tuple", "object", "map", "anyOf", "allOf", "types"]))
    if kind in ("array", "map"):
        (schema, fitting), least, most = draw(parts), draw(st.integers(0, 1)), draw(st.integers(1, 4))
        if kind == "array":
            found = st.lists(fitting, min_size=least, max_size=most)
            return {"type": kind, "items": schema, "minItems": least, "maxItems": most}, found
        pairs = st.dictionaries(st.text(LETTERS, max_size=4), fitting, min_size=least, max_size=most)
        return {"type": "object", "additionalProperties": schema, "minProperties": least, "maxProperties": most}, pairs
    pairs = draw(st.lists(parts, min_size=1, max_size=4))
    schemas, documents = [s for s, _ in pairs], [d for _, d in pairs]
    if kind == "tuple":
        return {"type": "array", "prefixItems": schemas, "items": False, "minItems": len(pairs)}, st.tuples(
            *documents
        ).map(list)
    if kind == "anyOf":
        return {"anyOf": schemas}, st.one_of(documents)
    if kind == "allOf":
        return {"allOf": [schemas[0], {"title": "x"}]}, documents[0]
    if kind == "types":
        return {"type": ["null", "boolean", "integer"], "minimum": 0}, st.one_of(
            st.none(), st.booleans(), st.integers(0)
        )
    named = dict(zip(draw(st.permutations(NAMES)), pairs, strict=False))
    required = draw(st.lists(st.sampled_from(sorted(named)), unique=True))
    made = {"type": "object", "properties": {n: s for n, (s, _) in named.items()}, "required": required}
    if draw(st.booleans()):
        made["additionalProperties"] = False
    shown = [n for n in named if n in required or draw(st.booleans())]
    ordered = st.fixed_dictionaries({n: named[n][1] for n in shown}).map(lambda found: {n: found[n] for n in shown})
    return made, ordered


def walk(schema: Any, seed: int) -> str | None:
    """A text that the grammar allows, token by token, at random. None if it does not end soon."""
    llm, grammars = small()
    assert llm.tokenizer is not None
    mask, tokens, draw = grammars.mask(grammars.compiled(Grammar.schema(schema))), list[int](), random.Random(seed)
    while len(tokens) < 150:
        allowed = mask.allowed(tokens, 0, ()).nonzero()[0].tolist()
        if llm.loaded.end_ids[0] in allowed:
            return llm.tokenizer.decode(tokens)
        short = [t for t in allowed if t < 300]  # single bytes among them: what closes a part, and what breaks one
        tokens.append(draw.choice(short if short and draw.random() < 0.6 else allowed))
    return None


def unreadable(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@given(
    pair=st.recursive(leaves(), larger, max_leaves=6),
    other=st.recursive(leaves(), larger, max_leaves=3),
    data=st.data(),
)
@settings(max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
def test_documents_of_random_schemas(pair: Pair, other: Pair, data: st.DataObject) -> None:
    """What a grammar writes is JSON that fits, what fits is accepted, and what does not fit is not."""
    schema, fitting = pair
    judge = Draft202012Validator(schema)
    document, stranger = data.draw(fitting), data.draw(other[1])
    accepted = taken(schema, document)
    event("refused" if accepted is None else "taken")
    if accepted is None:  # for example, no text fits
        return
    assert judge.is_valid(document)
    assert accepted == {True}
    assert judge.is_valid(stranger) or taken(schema, stranger) == {False}
    for seed in range(3):
        if (text := walk(schema, seed)) is not None:
            assert judge.is_valid(json.loads(text, parse_constant=unreadable)), text
