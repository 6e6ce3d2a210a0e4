"""Grammars: what is asked of a guess never changes what is known of the text, and illegal guesses are cut off."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from helpers import Loop, RandomTree, planned
from serving import PAIR, serving
from xgrammar import CompiledGrammar

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.child import Child, TooSlow
from outrider.core.compiling import compiler
from outrider.core.grammar import MAX_DEPTH, Grammar, Grammars
from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.types import Budget
from outrider.drafters import Drafter, SuffixDrafter
from outrider.drafters.base import DraftContext, NoDraft
from outrider.drafters.combine.planned import legal
from outrider.engine.request import Request
from outrider.serve.lanes import SECONDS

PATTERN = r"[a-d]{2}(-[0-9]+){1,3}"
ENDLESS = {"type": "string", "pattern": "^(([a-z]{1,30}){1,30}){1,30}$"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin:code", speculative_config=PAIR, max_num_seqs=2)


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer, 8192, llm.loaded.end_ids)


@pytest.mark.parametrize("trial", range(10))
def test_questions_about_guesses_leave_no_trace(grammars: Grammars, trial: int) -> None:
    draw = random.Random(trial)
    compiled, text = grammars.compiled(Grammar.regex(PATTERN)), [5, 6, 7]
    asked = grammars.mask(compiled)
    for _ in range(8):
        for _ in range(draw.randrange(4)):  # guesses, legal or not, some of them long
            extra = [draw.randrange(8192) for _ in range(draw.randrange(1, 4))]
            if draw.random() < 0.7:
                extra[0] = int(draw.choice(asked.allowed(text, 3, []).nonzero().flatten().tolist()))
            asked.allowed(text, 3, extra)
        fresh = grammars.mask(compiled)  # has read nothing but the committed tokens
        here = asked.allowed(text, 3, [])
        assert torch.equal(here, fresh.allowed(text, 3, []))
        choice = int(draw.choice(here.nonzero().flatten().tolist()))
        after = asked.allowed(text, 3, [choice])
        text.append(choice)
        assert torch.equal(after, grammars.mask(compiled).allowed(text, 3, []))
        assert torch.equal(after, asked.allowed(text, 3, []))
        if choice == 0:
            break


def test_text_under_a_grammar_is_plain_decodings_for_random_trees(llm: LLM, grammars: Grammars) -> None:
    target = llm.decoder.target

    def write(drafter, budget: Budget) -> list[list[int]]:
        options = {"rows": 2, "end_ids": llm.loaded.end_ids, "tokenizer": llm.tokenizer}
        decoder = Loop(target, drafter, controller=Fixed(*budget.parts), **options)
        compiled = grammars.compiled(Grammar.regex(PATTERN))
        requests = [
            Request(
                i, llm.encode("x = "), SamplingParams(temperature=t, max_tokens=20), i, mask=grammars.mask(compiled)
            )
            for i, t in enumerate([0, 1, 1.5])
        ]
        rows = decoder.generate(requests)
        assert all(re.fullmatch(PATTERN, row.checker.text) or row.finish.finish == "length" for row in rows)  # type: ignore[union-attr]
        return [row.output for row in rows]

    expected = write(NoDraft(), Budget(0))
    for drafter in (
        RandomTree(8192),
        planned({"tree": RandomTree(8192)}, (), Budget(3, 2, 6), True, 8192),
        llm.decoder.drafter,
    ):
        assert write(drafter, Budget(3, 2, 6)) == expected


def test_what_a_grammar_leaves_no_choice_about_is_drafted(llm: LLM, grammars: Grammars) -> None:
    names = ["first_register", "weighted_mean", "connection"]
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}, "required": names}
    compiled = grammars.compiled(Grammar.schema({**schema, "additionalProperties": False}))
    mask, text = grammars.mask(compiled), [1]
    for part, expected in (
        ("", '{"first_register": '),
        ('{"first', '_register": '),
        ("_register", '": '),
        ('": true', ', "weighted_mean": '),
        (", ", '"weighted_mean": '),
    ):
        text += llm.tokenizer(part, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        assert llm.tokenizer.decode(mask.expected(text, 1)) == expected  # type: ignore[union-attr]
        assert torch.equal(mask.allowed(text, 1, []), grammars.mask(compiled).allowed(text, 1, []))

    fixed = grammars.compiled(Grammar.regex(r"\{" + ", ".join(f'"{name}": [01]' for name in names) + r"\}"))

    def write(drafter: Drafter, depth: int) -> tuple[list[int], int]:
        options = {"rows": 1, "end_ids": llm.loaded.end_ids, "tokenizer": llm.tokenizer}
        decoder = Loop(llm.decoder.target, drafter, controller=Fixed(depth), **options)
        params = SamplingParams(temperature=0, max_tokens=80)
        row = decoder.generate([Request(0, llm.encode("x = "), params, 0, mask=grammars.mask(fixed))])[0]
        return row.output, row.counts.speculative.num_spec_steps

    plain, _ = write(NoDraft(), 0)
    drafted, steps = write(planned({"suffix": SuffixDrafter()}, ["suffix"], Budget(16)), 16)
    assert drafted == plain
    assert 3 * steps < 2 * len(plain)


def test_time_spent_on_drafts_ends_no_text(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = grammars.mask(grammars.compiled(Grammar.regex(r"abc[01]")))
    clock = itertools.count()
    monkeypatch.setattr("outrider.core.grammar.thread_time", lambda: 0.6 * next(clock))  # a question takes 0.6 s
    found = [bool(mask.expected([1], 1)) for _ in range(4)]
    assert found == [True, True, False, False]
    assert not mask.slow
    assert mask.allowed([1], 1, []).any()


def test_illegal_guesses_are_cut_with_what_hangs_on_them(llm: LLM, grammars: Grammars) -> None:
    a, b, dash, no = (llm.tokenizer(x)["input_ids"][0] for x in ("a", "b", "-", "zebra"))  # type: ignore[misc]
    history = SequenceState(
        SamplingParams(), (0,), (), [1, 2], 2, grammars.mask(grammars.compiled(Grammar.regex(r"[ab]{2}-x")))
    )
    noise = Noise(torch.tensor([0]), torch.tensor([0]))
    batch = DraftContext([0], [[1, 2]], [Budget(5)], LogitsWarper([history]), noise, Stream.TOKEN, False, [2])
    nodes = [(2, -1), (a, 0), (no, 0), (b, 1), (a, 2), (dash, 3), (no, 3), (dash, 1)]
    assert legal(batch, 0, nodes, range(1, len(nodes))) == [1, 3, 5]
    assert legal(batch, 0, nodes, [1, 5]) == [1], "its parent is not kept"


def test_a_grammar_of_another_process_is_the_same(grammars: Grammars) -> None:
    process = compiler(grammars.info)
    try:
        for seed, asked in enumerate(
            (
                Grammar.regex(PATTERN),
                Grammar.choice(["yes", "yesterday"]),
                Grammar.json(),
                Grammar.schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
            )
        ):
            made = process.ask([asked.method, list(asked.arguments)], 60)
            moved = grammars.mask(CompiledGrammar.deserialize_json(made, grammars._info))
            here, draw, text = grammars.mask(grammars.compiled(asked)), random.Random(seed), [0]
            for _ in range(12):
                allowed = moved.allowed(text, 1, [])
                assert torch.equal(allowed, here.allowed(text, 1, []))
                text.append(int(draw.choice(allowed.nonzero().flatten().tolist())))
    finally:
        process.close()


def test_a_grammar_that_takes_too_long_ends_its_process_and_the_next_one_is_compiled(grammars: Grammars) -> None:
    process = compiler(grammars.info)
    try:
        process.ask(["compile_regex", ["a"]], 60)
        first = process._process
        assert first is not None
        with pytest.raises(TooSlow, match=r"needs more than 0\.5 s"):
            grammars.compiled(Grammar.schema(ENDLESS), process, 0.5)
        assert first.poll() is not None  # nothing of it runs on
        assert grammars.compiled(Grammar.regex("[0-9]{3}x"), process, 60) is not None
        assert process._process is not None
        assert process._process.pid != first.pid
    finally:
        process.close()
    with pytest.raises(ChildProcessError):
        grammars.compiled(Grammar.regex("[0-9]{4}x"), process, 60)


def test_the_process_starts_without_torch() -> None:
    code = (
        "import sys; from outrider.core import compiling; made = compiling.compiler_alone();"
        "print(made.__name__, 'torch' in sys.modules and sys.modules['torch'] is not None)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["xgrammar", "False"]


def test_a_slow_grammar_is_moved_aside_and_the_others_do_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one is held in its second try for as long as the others take."""
    done, lanes, compiled = threading.Event(), [], Grammars.compiled

    def slow(self: Grammars, grammar: Grammar, process: Child, seconds: float):
        lanes.append((grammar.arguments[0], seconds))
        if grammar.arguments[0] == "s{9}":
            if seconds == SECONDS[0]:
                raise TooSlow("it is slow")
            assert done.wait(60)
        return compiled(self, grammar)

    monkeypatch.setattr(Grammars, "compiled", slow)

    def body(pattern: str) -> dict:
        return {"prompt": "x", "max_tokens": 12, "structured_outputs": {"regex": pattern}}

    with serving(llm) as live, ThreadPoolExecutor(1) as pool:
        held = pool.submit(httpx.post, live.url + "/v1/completions", json=body("s{9}"), timeout=60)
        while len(lanes) < 2:
            assert not held.done()
        for pattern in ("a{3}", "b{3}", "c{3}"):
            assert httpx.post(live.url + "/v1/completions", json=body(pattern), timeout=60).status_code == 200
        done.set()
        assert held.result().json()["choices"][0]["text"] == "s" * 9
        assert httpx.post(live.url + "/v1/completions", json=body("s{9}"), timeout=60).status_code == 200
    assert [lane for lane in lanes if lane[0] == "s{9}"] == [("s{9}", SECONDS[0]), ("s{9}", SECONDS[1])]


def test_only_so_many_grammars_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.serve.service.MAX_COMPILING", 0)
    body = {"prompt": "x", "structured_outputs": {"regex": "[xyz]{2}"}}
    with serving(llm) as live:
        full = httpx.post(live.url + "/v1/completions", json=body, timeout=60)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert full.headers["retry-after"] == "10"


IGNORED = [
    ({"not": {"type": "string"}}, "'not'"),
    ({"properties": {"a": {"if": {"const": 1}, "then": {"const": 2}}}}, "'if'"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "items": {"contains": {"const": 5}}}, "'contains'"),
    ({"$ref": "file:///etc/passwd"}, "'file:///etc/passwd'"),
    ({"anyOf": [{"$ref": "#other"}]}, "'#other'"),
    ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string"}}}, "'maxLength' beside '$ref'"),
    ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "'allOf' of several"),
    ({"minimum": 3}, "'minimum' without 'type'"),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
    ({"type": "string", "pattern": "^b+$", "maxLength": 2}, "'maxLength' beside 'pattern'"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'required' with 'b'"),
]


@pytest.mark.parametrize(("schema", "words"), IGNORED, ids=[words for _, words in IGNORED])
def test_a_schema_whose_keywords_would_be_ignored_is_refused_by_name(schema: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Grammar.schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "A", "description": "not", "type": "object", "properties": {"not": {"type": "string"}, "if": {}}},
        {"enum": ["a", {"not": 1}], "type": "string", "default": {"uniqueItems": True}},
        {"type": ["integer", "null"], "minimum": 3},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"type": "string", "format": "colour"}}}},
        {"anyOf": [{"type": "integer", "multipleOf": 5}, {"const": None}], "title": "B", "default": None},
        {"properties": {"a": {"type": "string", "minLength": 2}}, "required": ["a"], "additionalProperties": False},
        True,
    ],
)
def test_a_schema_whose_keywords_count_is_taken(grammars: Grammars, schema: dict | bool) -> None:
    assert grammars.compiled(Grammar.schema(schema)) is not None


def test_a_new_grammar_is_tried_in_the_process(grammars: Grammars) -> None:
    """A mask that takes for ever would stop the server, and there is a clock in the process."""
    process = compiler(grammars.info)
    try:
        with pytest.raises(ValueError, match="the schema cannot be used: no text fits"):
            grammars.compiled(Grammar.schema({"$ref": "#"}), process, 60)
        assert grammars.compiled(Grammar.regex("[ab]{8}"), process, 60) is not None
    finally:
        process.close()


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}],
)
def test_a_schema_that_allows_nothing_is_refused(grammars: Grammars, schema: dict) -> None:
    with pytest.raises(ValueError, match="no text fits"):
        grammars.compiled(Grammar.schema(schema))


def test_a_grammar_whose_masks_take_long_is_refused_and_ends_its_own_text_only(
    llm: LLM, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is counted in questions here: each takes a second."""
    clock = itertools.count()
    for module in ("grammar", "compiling"):
        monkeypatch.setattr(f"outrider.core.{module}.thread_time", lambda: float(next(clock)))
    with pytest.raises(ValueError, match="too many ways"):
        grammars.compiled(Grammar.regex("[ab]{9}"))
    made = grammars._xgrammar.GrammarCompiler(grammars._info).compile_regex("[ab]{9}")
    mask = grammars.mask(made)
    asked = [bool(mask.allowed([], 0, []).any()) for _ in range(4)]
    assert asked == [True, True, False, False]
    request = Request(0, llm.encode("x = "), SamplingParams(max_tokens=9), 0, mask=mask)
    decoder = Loop(llm.decoder.target, NoDraft(), rows=2, end_ids=llm.loaded.end_ids, tokenizer=llm.tokenizer)
    [text] = decoder.generate([request])
    assert text.finish is not None
    assert text.finish.finish == "length"


def test_grammars_are_kept_up_to_a_size(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Grammar.regex("a{5}b"), Grammar.regex("a{6}b")
    made = grammars.compiled(first)
    assert grammars.compiled(first) is made
    monkeypatch.setattr("outrider.core.grammar._CACHE", 1)
    last = grammars.compiled(second)
    assert grammars.known(first) is None
    assert grammars.known(second) is last


def test_what_cannot_be_compiled_says_why(grammars: Grammars) -> None:
    deep: dict = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    for ask, words in (
        (lambda: Grammar.schema(json.dumps(deep)), "nested deeper than 32"),
        (lambda: Grammar.schema("{"), "is not JSON"),
        (lambda: grammars.compiled(Grammar.schema({"type": "nothing"})), 'Unsupported type "nothing"'),
        (lambda: Grammar.regex("(" * 70_000), "bytes and may have"),
        (lambda: Grammar.choice([]), "1 to 1000 strings"),
        (lambda: Grammars(None, 10, [0]), "needs a tokenizer"),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            ask()
        assert ".cc" not in str(refused.value)
