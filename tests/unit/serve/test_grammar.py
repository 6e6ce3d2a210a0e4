"""Grammars: what is asked of a draft never changes what is known of the text, and what cannot be enforced is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from contextlib import suppress

import httpx
import numpy as np
import pytest
from grammars import accepts
from helpers import Loop, RandomTree, planned
from serving import PAIR, serving
from tokenizers import Tokenizer, decoders, models, normalizers

from outrider import LLM, SamplingParams
from outrider.control import CostModel, Costs, Fixed
from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.types import Budget
from outrider.drafters import Drafter, SuffixDrafter
from outrider.drafters.base import DraftContext, NoDraft
from outrider.drafters.proposal import legal
from outrider.engine.request import Request
from outrider.models.tokenizer import FastTokenizer
from outrider.serve.grammar import KEPT, MAX_BYTES, Grammar, Grammars
from outrider.serve.options import ServeOptions
from outrider.serve.tools import PLAIN, ToolOffer

pytest.importorskip("llguidance")
PATTERN = r"[a-d]{2}(-[0-9]+){1,3}"
NAMES = ["first_register", "weighted_mean", "connection"]
# each ends in an error, at once or after some tokens; see docs/guides/serve.md
SLOW = [r"(([a-z]{1,30}){1,30}){1,30}", r"(\w{1,50}\s?){1,50}", r"a{1000000}", r".*a.{200}b.{200}c"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin:code", speculative_config=PAIR, max_num_seqs=2)


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer, 8192, llm.loaded.end_ids)


@pytest.mark.parametrize("trial", range(4))
def test_questions_about_drafts_leave_no_trace(grammars: Grammars, trial: int) -> None:
    draw = random.Random(trial)
    asked_of = Grammar.regex(PATTERN) if trial % 2 else Grammar.schema({"enum": ["ab\tc", "abd", 17, True]})
    compiled, text = grammars.compiled(asked_of), [5, 6, 7]
    asked = grammars.mask(compiled)
    for _ in range(8):
        for _ in range(draw.randrange(4)):  # drafts, legal or not, some of them long
            extra, legal = list[int](), 0
            for place in range(draw.randrange(1, 4)):
                may = asked.allowed(text, 3, extra).nonzero()[0].tolist()
                extra.append(int(draw.choice(may)) if may and draw.random() < 0.7 else draw.randrange(8192))
                legal += legal == place and extra[-1] in may and 0 not in extra[:-1]  # nothing follows an end token
            assert asked.legal_prefix(text, 3, extra) == legal
            asked.allowed(text, 3, extra)
            asked.forced_tokens(text, 3)
        fresh = grammars.mask(compiled)  # has read nothing but the committed tokens
        here = asked.allowed(text, 3, [])
        assert np.array_equal(here, fresh.allowed(text, 3, []))
        choice = int(draw.choice(here.nonzero()[0].tolist()))
        after = asked.allowed(text, 3, [choice])
        text.append(choice)
        assert np.array_equal(after, grammars.mask(compiled).allowed(text, 3, []))
        assert np.array_equal(after, asked.allowed(text, 3, []))
        if choice == 0:
            break


def test_text_under_a_grammar_is_plain_decodings_for_random_trees(llm: LLM, grammars: Grammars) -> None:
    target = llm.decoder.target

    def write(drafter, budget: Budget) -> list[list[int]]:
        options = {"num_slots": 2, "end_ids": llm.loaded.end_ids, "tokenizer": llm.tokenizer}
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
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in NAMES}, "required": NAMES}
    compiled = grammars.compiled(Grammar.schema({**schema, "additionalProperties": False}))
    mask, text = grammars.mask(compiled), [1]
    for part, forced in (
        ("", ""),  # { or {"
        ('{"first', "_register"),  # its quote may be a part of a token with the colon
        ("_reg", "ister"),
        ('ister": tru', "e"),
        ('e, "', "weighted_mean"),
    ):
        text += llm.tokenizer(part, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        assert llm.tokenizer.decode(mask.forced_tokens(text, 1)) == forced  # type: ignore[union-attr]
        assert np.array_equal(mask.allowed(text, 1, []), grammars.mask(compiled).allowed(text, 1, []))

    fixed = grammars.compiled(Grammar.regex(r"\{" + ", ".join(f'"{name}": [01]' for name in NAMES) + r"\}"))

    def write(drafter: Drafter, depth: int) -> tuple[list[int], int]:
        options = {"num_slots": 1, "end_ids": llm.loaded.end_ids, "tokenizer": llm.tokenizer}
        decoder = Loop(llm.decoder.target, drafter, controller=Fixed(depth), **options)
        params = SamplingParams(temperature=0, max_tokens=80)
        row = decoder.generate([Request(0, llm.encode("x = "), params, 0, mask=grammars.mask(fixed))])[0]
        return row.output, row.counts.speculative.num_spec_steps

    plain, _ = write(NoDraft(), 0)
    drafted, steps = write(
        planned({"suffix": SuffixDrafter()}, ["suffix"], Budget(16), vocab=llm.decoder.target.vocab_size), 16
    )
    assert drafted == plain
    assert 3 * steps < 2 * len(plain)


@pytest.mark.parametrize("method", ["auto", "suffix"])
def test_what_a_grammar_leaves_no_choice_about_costs_few_steps_of_a_server(method: str) -> None:
    """By default, and with lookups alone, which can only know it from the grammar. The tokens are plain decoding's."""
    options = ServeOptions(model="code", speculative_config={"method": method})
    assert ServeOptions(model="code").speculative_config == {"method": "auto"}
    llm = LLM("builtin:code", speculative_config=options.speculative_config, max_num_seqs=1, any_method=True)
    body = {"prompt": "x = ", "max_tokens": 200, "temperature": 0, "return_token_ids": True}
    letters = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=160))  # which no drafter guesses
    texts = [f"{letters}[ab]"]
    texts.append(json.dumps({"name": NAMES, "note": "a text that nobody has to choose", "numbers": [[12, 34], [56]]}))
    with serving(llm, options) as live:
        planner = live.service.engine.roster.planner  # costs of a busy machine could hold drafts back
        planner.costs = Costs(
            CostModel({}, {1: 1.0, 16: 1.5})
        )  # seconds: what is around a draft is nothing beside them
        planner.costs.observe_forward = planner.costs.observe_draft = lambda *seconds: None  # type: ignore[method-assign]
        for form in ({"regex": texts[0]}, {"choice": texts[1:]}):
            ways = [body | {"structured_outputs": form, "method": method} for method in ("none", None)]
            plain, drafted = (httpx.post(live.url + "/v1/completions", json=way).json() for way in ways)
            assert plain["choices"][0]["token_ids"] == drafted["choices"][0]["token_ids"]
            counts, written = drafted["metrics"]["speculative_decoding"], drafted["usage"]["completion_tokens"]
            assert counts["num_spec_steps"] < 0.75 * written


def test_illegal_drafts_are_cut_with_what_hangs_on_them(llm: LLM, grammars: Grammars) -> None:
    a, b, dash, no = (llm.tokenizer(x)["input_ids"][0] for x in ("a", "b", "-", "zebra"))  # type: ignore[misc]
    history = SequenceState(
        SamplingParams(), (0,), (), [1, 2], 2, grammars.mask(grammars.compiled(Grammar.regex(r"[ab]{2}-x")))
    )
    noise = Noise(np.array([0]), np.array([0]))
    batch = DraftContext([0], [[1, 2]], [Budget(5)], LogitsWarper([history]), noise, Stream.TOKEN, False, [2])
    nodes = [(2, -1), (a, 0), (no, 0), (b, 1), (a, 2), (dash, 3), (no, 3), (dash, 1)]
    assert legal(batch, 0, nodes, range(1, len(nodes))) == [1, 3, 5]
    assert legal(batch, 0, nodes, [1, 5]) == [1], "its parent is not kept"


# Each of these has a meaning of its own in some language, and the library would take it for another one or for a letter.
MEANT = r"""
    \Aab\Z \h{2} \R \Qa.b\E \K \G \X \i \y \cA a\b \<a (?=a)b (?<!a)b (a)\1 \k<n> (?>a) (?#c)a
    [a&&b] [a--b] [a~~b] [[:alpha:]] [[a]b] ( a$b b^a \p{Foo} a{3,2} [b-a]
"""


@pytest.mark.parametrize("pattern", [*MEANT.split(), "\ud83d"])
def test_a_pattern_that_other_languages_read_otherwise_is_refused(grammars: Grammars, pattern: str) -> None:
    for make, what in (
        (lambda: Grammar.regex(pattern), "regular expression"),
        (lambda: Grammar.schema({"type": "string", "pattern": pattern}), "schema"),
        (lambda: Grammar.schema({"type": "object", "patternProperties": {pattern: {}}}), "schema"),
    ):
        with pytest.raises(ValueError, match=rf"(the {what}|'\[.*') cannot be used: .{{9}}"):
            grammars.compiled(make())


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[\[a]\&\&[^\]&]", ["[&&x", "a&&é"], ["a&&]"]),
        (r"\x41\u0042\u{43}\t\n/\/", ["ABC\t\n//"], ["ABC\t\n/"]),
        (r"^(?:a|é|𓀀)+?$", ["a𓀀é"], ["", "aa "]),
        (r"\p{Greek}+\d", ["αβ7"], ["ab7"]),
        (r'"/{2}"', ['"//"'], ['"/"']),
        ("", [""], ["a"]),
        ("a\n\tb", ["a\n\tb"], ["a b"]),
    ],
)
def test_a_pattern_matches_the_whole_text(
    llm: LLM, grammars: Grammars, pattern: str, good: list[str], bad: list[str]
) -> None:
    grammar = Grammar.regex(pattern)
    assert [accepts(llm, grammars, grammar, text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


def test_choices_are_written_letter_by_letter(llm: LLM, grammars: Grammars) -> None:
    choices = ["yes", "yesterday", 'a"b\\c\n', "\u2028", "𓀀é", "/x/", "\x01", "{}", "\\u0041", "\\n", "<|im_end|>", " "]
    grammar = Grammar.choice(choices)
    assert all(accepts(llm, grammars, grammar, text) for text in choices)
    assert not any(accepts(llm, grammars, grammar, text) for text in ("yest", "A", "\n", "", "x"))


OBJECT = {"type": "object"}
CASES: list[tuple[dict, list[str], list[str]]] = [
    # keywords alone allow all else
    ({"type": "array", "maxItems": 2}, ["[]", "[1]", '[{"a": [1, 2, 3]}, null]'], ["[1, 2, 3]", "{}"]),
    ({"type": "array", "minItems": 2}, ["[1, 2]", "[1, 2, 3]"], ["[1]"]),
    ({**OBJECT, "maxProperties": 1}, ["{}", '{"a": {"b": 1, "c": 2}}'], ['{"a": 1, "b": 2}']),
    ({**OBJECT, "minProperties": 1}, ['{"a": 1, "b": 2}'], ["{}"]),
    ({**OBJECT, "required": ["b"]}, ['{"b": 1}', '{"b": 1, "c": 2}'], ["{}", '{"c": 2}']),
    ({"minimum": 3}, ["3", "[]", '"a"'], ["2"]),
    # strings are JSON, and their length is that of their text
    (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"a\\tb"', '"\\"\\""', '"\\\\n"', '"é𓀀"', '"\\u00e9\\u0001"', '"\\ud83d\\ude00x"'],
        ['"a\tb"', '"a\nb"', '"a\x00b"', '"ab', '"\\ud83dab"', '"\\ude00\\ud83d"', '"é"', '"\\x41a"', "'ab'"],
    ),
    ({"type": "string"}, ['"\\ud83d\\ude00"', '"\\u0000"'], ['"\\ud83d"', '"\\ude00"', '"\\ud83d\\ud83d"', '"\x1f"']),
    ({"type": "string", "pattern": "^[^a]+$"}, ['"\\n"', '"é"'], ['"\n"', '"a"', '"\\ud83d"', '"\\u0061"']),
    # a name may be written in one way, where another schema holds for other names
    (
        {**OBJECT, "properties": {"a": {"type": "integer"}}},
        ['{"a": 1, "b": "x"}'],
        ['{"\\u0061": "x"}', '{"a": "x"}', '{"b": 1, "a": 1}', '{"a": 1, "a": "x"}'],
    ),
    (
        {**OBJECT, "properties": {"\n\x1e": {"type": "integer"}}},
        ['{"\\n\\u001e": 1}'],
        ['{"\\n\\u001e": "x"}', '{"\\u000a\\u001E": "x"}'],
    ),
    # formats that are not known are notes
    ({"type": "string", "format": "colour"}, ['"x"'], ["1"]),
    (
        {"properties": {"format": {"const": {"format": "colour"}}}},
        ['{"format": {"format": "colour"}}'],
        ['{"format": 1}'],
    ),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"x"']),
    # what allows all is no keyword, and names of properties are none
    (
        {
            **OBJECT,
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "array", "uniqueItems": False},
        },
        ['{"a": [1, 1]}'],
        ['{"a": 1}'],
    ),
    (
        {**OBJECT, "properties": {"uniqueItems": False, "propertyNames": {"type": "string"}}},
        ['{"propertyNames": "x"}'],
        ['{"uniqueItems": 1}', '{"propertyNames": 1}'],
    ),
    (
        {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
        ["-9223372036854774784"],
        ["9223372036854775808"],
    ),
    ({"x-guidance": {"lenient": True, "whitespace_flexible": True}}, ["1"], ["{  }"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[json.dumps(case[0])[:60] for case in CASES])
def test_what_a_schema_takes_is_json_and_fits_it(
    llm: LLM, grammars: Grammars, schema: dict, good: list[str], bad: list[str]
) -> None:
    grammar = Grammar.schema(schema)
    assert [text for text in good if not accepts(llm, grammars, grammar, text)] == []
    assert [text for text in bad if accepts(llm, grammars, grammar, text)] == []


def nested(levels: int) -> object:
    return ({"a": nested(levels - 1)} if levels % 2 else [nested(levels - 1)]) if levels else 1


def closed(levels: int) -> dict:
    inner = closed(levels - 1) if levels > 1 else {"const": 1}
    if levels % 2:
        return {**OBJECT, "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
    return {"type": "array", "items": inner}


@pytest.mark.parametrize(("asked", "levels"), [("object", 7), ("schema", 8), ("tools", 7), ("deep", 12)])
def test_space_in_json_is_an_indent_and_no_more(llm: LLM, grammars: Grammars, asked: str, levels: int) -> None:
    """Without a bound a model may write spaces until its tokens are used up."""
    deepest, around = 8, "%s"
    if asked == "tools":
        offer, around = ToolOffer({"f": OBJECT}, True), '{"name": "f", "arguments": %s}'
        grammar = Grammar.tools(offer.grammar(PLAIN), [OBJECT])
    elif asked == "deep":
        grammar, deepest = Grammar.schema({"items": closed(levels - 1)}), 19  # parts in parts of the schema
    else:
        grammar = Grammar.schema() if asked == "object" else Grammar.schema({"type": ["object", "array"]})

    def taken(text: str) -> bool:
        return accepts(llm, grammars, grammar, around % text)

    for indent in (None, 1, 2, 4, "\t"):
        assert taken(json.dumps(nested(levels), indent=indent))
    start, end = ("[", "]") if asked == "deep" else ("{", "}")
    spaces = ["", " ", "\t", "\n", "\r\n", " \n", "\n" + 4 * deepest * " ", "\n" + deepest * "\t"]
    assert [space for space in spaces if not taken(start + space + end)] == []
    spaces = [
        "  ",
        "\t\t",
        " \t",
        "\n\n",
        "\n \n",
        "\n \t",
        "\n" + (4 * deepest + 1) * " ",
        "\n" + (deepest + 1) * "\t",
    ]
    assert [space for space in spaces if taken(start + space + end)] == []
    assert not any(map(taken, (" {}", "{} ", "\n{}", "{}\n")))


def test_brackets_in_a_text_of_a_schema_do_not_widen_its_space(llm: LLM, grammars: Grammars) -> None:
    grammar = Grammar.schema({**OBJECT, "description": "[" * 9000})
    assert accepts(llm, grammars, grammar, "{\n" + 128 * " " + "}")
    assert not accepts(llm, grammars, grammar, "{\n" + 129 * " " + "}")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((lambda key=key: Grammar.schema({key: {}}), key) for key in ("not", "if", "contains", "dependencies")),
        (lambda: Grammar.schema({"x-guidance": {"lenient": True}, "uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.schema({"oneOf": [{"type": "integer"}, {"minimum": 2}]}), "oneOf.*Write anyOf"),
        (lambda: Grammar.schema({"properties": {"default": {"pattern": "[a&&b]"}}}), "in other ways"),
        (lambda: Grammar.schema({"$ref": "file:///etc/passwd"}), "file:///etc/passwd"),
        (lambda: Grammar.schema({"type": "nothing"}), "Invalid type: nothing"),
        (lambda: Grammar.schema({"$ref": "#"}), "no text fits"),
        (lambda: Grammar.schema({"enum": []}), "Unsatisfiable"),
        (lambda: Grammar.schema({**OBJECT, "minProperties": 2}), "may come twice"),
        (lambda: Grammar.schema("{"), "Expecting property name"),
        (lambda: Grammar.schema("[1]"), "object or boolean"),
        (lambda: Grammar.schema(False), "no text fits|[Uu]nsatisfiable"),
        (lambda: Grammar.schema({"const": "\ud83d"}), "hex escape"),
        (lambda: Grammar.schema(json.loads('{"items":' * 300 + "{}" + "}" * 300)), "recursion limit"),
        (lambda: Grammar.regex("a" * (MAX_BYTES + 1)), "bytes and may have"),
        (lambda: Grammar.choice([]), "strings that are not empty"),
        (lambda: Grammars(None, 10, [0]), "needs a tokenizer"),
    ],
)
def test_what_cannot_be_enforced_says_why(grammars: Grammars, make: Callable[[], Grammar], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        grammars.compiled(make())
    assert "x-guidance" not in str(refused.value)


WORDS = """
    type enum const properties required additionalProperties patternProperties minProperties maxProperties items prefixItems
    minItems maxItems uniqueItems minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
    anyOf allOf oneOf $ref $defs definitions $schema $id $anchor title description default examples propertyNames x-guidance
"""


@pytest.mark.parametrize("word", WORDS.split())
def test_a_value_of_a_wrong_type_is_refused_or_a_note(grammars: Grammars, word: str) -> None:
    for value in (None, True, -1, 2.5, 1 << 70, "\ud83d", [1], [None], {}, {"a": {"a": []}}):
        for make in (
            lambda v=value: Grammar.schema({word: v}),
            lambda v=value: Grammar.tools("start: @s0", [{**OBJECT, "properties": {"a": {word: v, "type": "string"}}}]),
        ):
            with suppress(ValueError):
                grammars.compiled(make())


@pytest.mark.parametrize("pattern", SLOW)
def test_a_slow_grammar_ends_its_own_text_only(llm: LLM, grammars: Grammars, pattern: str) -> None:
    """It is refused, or the limits of the library end its text; another text goes on."""
    try:
        mask = grammars.mask(grammars.compiled(Grammar.regex(pattern)))
    except ValueError:
        return
    other = Request(1, llm.encode("x = "), SamplingParams(temperature=0, max_tokens=40), 0)
    slow = Request(0, llm.encode("x = "), SamplingParams(max_tokens=40, temperature=1), 0, mask=mask)
    decoder = Loop(llm.decoder.target, NoDraft(), num_slots=2, end_ids=llm.loaded.end_ids, tokenizer=llm.tokenizer)
    first, second = decoder.generate([slow, other])
    assert first.finish is not None
    assert first.finish.finish in ("stop", "length")
    assert second.output == decoder.generate([other])[0].output


def test_grammars_are_kept_up_to_a_number(grammars: Grammars) -> None:
    made = [grammars.compiled(Grammar.regex(f"a{{{n}}}b")) for n in range(1, KEPT + 2)]
    assert grammars.compiled(Grammar.regex(f"a{{{KEPT}}}b")) is made[KEPT - 1]
    assert grammars.compiled(Grammar.regex("a{1}b")) is not made[0]


def _spaced() -> FastTokenizer:
    """As Llama 2's: `▁` for a space, before a text too, and tokens of bytes for the rest. The end token is no special one."""
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {t: n for n, t in enumerate(["<unk>", "</s>", *letters, "▁", "▁true", "true", "a", "▁a", '"', '▁"', "{"])}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    return FastTokenizer(made, {"unk_token": "<unk>"})


def test_a_vocabulary_of_sentencepiece_with_ends_and_unused_tokens() -> None:
    tokenizer = _spaced()
    names = tokenizer.get_vocab()
    grammars = Grammars(tokenizer, len(names) + 40, [names["</s>"], names["<unk>"]])
    mask = grammars.mask(grammars.compiled(Grammar.schema({"enum": [True, {"a": "</s>𓀀 a"}]})))
    first = mask.allowed([5], 1, ()).nonzero()[0].tolist()
    assert first == sorted(names[t] for t in ("true", "<0x74>", "{", "<0x7B>")), "no token with a space, and no end"
    text = [5, *(names[f"<0x{byte:02X}>"] for byte in '{"a": "</s>𓀀'.encode()), names["▁a"], names['"']]
    end = mask.allowed([*text, names["<0x7D>"]], 1, ())
    assert end.nonzero()[0].tolist() == [names["<unk>"], names["</s>"]]
    assert len(end) == len(names) + 40
    assert np.array_equal(end, mask.allowed([*text, names["<0x7D>"], names["</s>"]], 1, [names["</s>"]])), (
        "it stays complete"
    )


def test_a_continued_text_must_fit_its_grammar_and_fields_are_named(llm: LLM) -> None:
    with serving(llm) as live:
        negative = {"name": "a", "schema": {"not": {}}}
        body = {"prompt": "x = ", "max_tokens": 9, "structured_outputs": {"choice": ["yes"]}}
        for more, says, param in (
            ({"continued_tokens": llm.tokenizer("no")["input_ids"]}, "break the grammar", "continued_tokens"),  # type: ignore[misc]
            ({"structured_outputs": {"regex": "\\h"}}, "unrecognized escape", "structured_outputs"),
            (
                {"structured_outputs": None, "response_format": {"type": "json_schema", "json_schema": negative}},
                'Unimplemented keys: ["not"]',
                "response_format",
            ),
        ):
            answer = httpx.post(live.url + "/v1/completions", json=body | more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert says in answer.json()["error"]["message"]
        good = body | {"continued_tokens": llm.tokenizer("ye")["input_ids"]}  # type: ignore[misc]
        assert httpx.post(live.url + "/v1/completions", json=good).json()["choices"][0]["text"] == "s"


def test_json_ends_though_the_model_would_write_spaces(llm: LLM) -> None:
    """Without a bound, this model writes `{` and spaces for ever."""
    bounds: list[dict] = [{}, {"maxLength": 20}]  # a text without a bound of its own is the model's
    with serving(llm) as live:
        for bound in (*bounds, None):
            properties = {"name": {"type": "string", **(bound or {})}, "age": {"type": "integer"}}
            schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
            schema |= {"additionalProperties": False} if bound else {}
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            body = {"prompt": "data = ", "max_tokens": 300, "temperature": 0}
            body["response_format"] = {"type": "json_object"} if bound is None else form
            [choice] = httpx.post(live.url + "/v1/completions", json=body).json()["choices"]
            assert not re.search(r"^\{\s{2}|\s{35}", choice["text"]), choice["text"]
            if bound != {}:
                assert choice["finish_reason"] == "stop"
                assert bound is None or {"name", "age"} <= set(json.loads(choice["text"]))
