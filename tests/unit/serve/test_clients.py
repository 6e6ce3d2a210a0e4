"""What real clients send and read: scored prompts, token ids, vLLM's metrics, and fields that must not be ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import sleep

import httpx
import pytest
from serving import Live, builtin, serving

from outrider import LLM, SamplingParams
from outrider.engine.fingerprint import Fingerprint
from outrider.models.chat_template import set_chat_template
from outrider.models.load import load
from outrider.serve.options import ServeOptions, served_name
from outrider_lab.fingerprints import read_fingerprint, rewrite

PROMPT = "def quicksort(xs):\n"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(2), ServeOptions(model="builtin:code", metrics_prefix="vllm")) as live:
        yield live


@pytest.fixture(scope="module")
def plain() -> LLM:
    return builtin(1, None)


def scored(plain: LLM, prompt: str, **params) -> tuple[list[int], dict, str]:
    """The prompt's tokens, what OpenAI's `logprobs` must hold with echo, and the text: from the library alone."""
    out = plain.generate(prompt, SamplingParams(prompt_logprobs=2, logprobs=2, **params))[0]
    done, tokenizer = out.outputs[0], plain.tokenizer
    assert tokenizer is not None
    assert out.prompt_logprobs is not None
    assert done.logprobs is not None
    tokens, told = [*out.prompt_token_ids, *done.token_ids], [*out.prompt_logprobs, *done.logprobs]
    texts = [tokenizer.decode([t]) for t in tokens]
    return (
        tokens,
        {
            "tokens": texts,
            "token_logprobs": [None if x is None else x[t] for t, x in zip(tokens, told, strict=True)],
            "top_logprobs": [None if x is None else {tokenizer.decode([t]): v for t, v in x.items()} for x in told],
            "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
        },
        prompt + done.text,
    )


def test_echo_with_logprobs_scores_the_prompt(live: Live, plain: LLM) -> None:
    tokens, expected, text = scored(plain, PROMPT, temperature=0, max_tokens=3)
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}
    choice = live.ask(**body)["choices"][0]
    assert choice["text"] == text
    assert choice["logprobs"] == expected
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(tokens) == len(plain.encode(PROMPT)) + 3
    assert "prompt_logprobs" not in choice  # nobody asked for this form
    both = live.ask(**body, prompt_logprobs=1)["choices"][0]
    assert both["logprobs"] == expected
    assert [len(x) for x in both["prompt_logprobs"][1:]] == [
        1 + (max(x, key=x.get) != str(t)) for t, x in zip(tokens[1:], both["prompt_logprobs"][1:], strict=False)
    ]
    chunks = [c["choices"][0] for c in live.events(**body)]
    streamed = [c["logprobs"] for c in chunks if c["logprobs"]]
    assert "".join(c["text"] for c in chunks) == text
    assert {name: [x for part in streamed for x in part[name]] for name in expected} == expected
    plainly = live.ask(**{**body, "echo": False})["choices"][0]["logprobs"]
    assert plainly["tokens"] == expected["tokens"][-3:]
    assert plainly["text_offset"][0] == 0


def test_no_tokens_are_written_where_only_the_prompt_is_scored(live: Live, plain: LLM) -> None:
    _, expected, _ = scored(plain, PROMPT, max_tokens=1)
    count = len(plain.encode(PROMPT))
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
    before = live.registry.get_sample_value("vllm:generation_tokens_total", {"model_name": "code", "engine": "0"})
    answer = live.ask(**body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"] == {name: values[:count] for name, values in expected.items()}
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
    chunks = live.events(**body, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["logprobs"] == choice["logprobs"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    one = live.ask(prompt=[plain.encode(PROMPT)[:1]], max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert one["logprobs"]["token_logprobs"] == [None]
    several = live.ask(**{**body, "prompt": [PROMPT, "import os\n"], "n": 2})
    assert [c["text"] for c in several["choices"]] == [PROMPT, PROMPT, "import os\n", "import os\n"]
    other = live.ask(prompt=PROMPT, max_tokens=0, prompt_logprobs=0)["choices"][0]
    assert (other["text"], len(other["prompt_logprobs"])) == ("", count)
    registry = live.registry
    assert registry.get_sample_value("vllm:generation_tokens_total", {"model_name": "code", "engine": "0"}) == before
    long = "x = 1\n" * 200  # several chunks of prefill, and others that write meanwhile
    assert live.ask(prompt=long, max_tokens=0, echo=True)["choices"][0]["text"] == long


def test_ids_outside_of_the_vocabulary_are_no_text(live: Live) -> None:
    last = live.service.engine.decoder.target.vocab_size - 1
    for token, status in ((last, 200), (last + 1, 400), (-1, 400)):
        assert httpx.post(live.url + "/detokenize", json={"tokens": [token]}).status_code == status


def test_numbers_in_strings_are_taken_and_other_strings_are_not(live: Live) -> None:
    numbers = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 6, "seed": 7, "logprobs": 1, "presence_penalty": -1.5}
    usual = live.ask(prompt=PROMPT, **numbers)["choices"]
    assert live.ask(prompt=PROMPT, **{name: str(value) for name, value in numbers.items()})["choices"] == usual
    assert live.ask(prompt="12", max_tokens=1)["usage"]["prompt_tokens"] == len(live.service.prompts.encode("12"))
    wrong = [
        ("temperature", "0,5"),
        ("temperature", "1e999"),
        ("temperature", "NaN"),
        ("max_tokens", "1.5"),
        ("seed", "07"),
    ]
    for name, value in [*wrong, ("max_tokens", True), ("echo", "1"), ("max_tokens", "9" * 5000)]:
        response = httpx.post(live.url + "/v1/completions", json={"prompt": PROMPT, name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text


def test_a_served_name_has_no_colon_and_the_other_name_works_too(live: Live, tmp_path: Path) -> None:
    (own := tmp_path / "a:b").mkdir()
    given = ("builtin:code-draft", "owner/name:small.Q8_0.gguf", "owner/name", str(own))
    assert [served_name(name) for name in given] == ["code-draft", "small.Q8_0", "owner/name", "b"]
    for name in ("code", "builtin:code"):
        assert live.ask(model=name, prompt=PROMPT, max_tokens=1)["model"] == "code"
        assert httpx.get(f"{live.url}/v1/models/{name}").json()["id"] == "code"
    assert httpx.get(live.url + "/v1/models/builtin:code-draft").status_code == 404


def test_a_builtin_model_without_a_chat_template_gets_a_plain_one() -> None:
    llm = LLM("builtin:code", any_method=True)
    assert "comments" in (set_chat_template(llm.tokenizer, "builtin:code", None) or "")
    messages = [
        {"role": "system", "content": "Be brief.\nUse lists."},
        {"role": "user", "content": "sort xs"},
        {"role": "assistant", "content": "xs.sort()"},
        {"role": "user", "content": "reverse it"},
    ]
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "find")]
    assert llm.tokenizer is not None
    told = llm.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert told == "# tools: look, find\n# Be brief.\n# Use lists.\n# sort xs\nxs.sort()\n# reverse it\n"
    assert llm.tokenizer.apply_chat_template(messages[1:2], tokenize=False) == "# sort xs\n"
    assert set_chat_template(llm.tokenizer, "builtin:code", None) is None  # it has one now, and keeps it
    assert set_chat_template(llm.tokenizer, "builtin:code", "own") is None
    assert llm.tokenizer.chat_template == "own"
    assert set_chat_template(None, "builtin:code", None) is None
    with pytest.raises(ValueError, match="has no tokenizer"):
        set_chat_template(None, "builtin:code", "own")


def test_token_ids_are_returned_where_they_are_asked_for(live: Live, plain: LLM) -> None:
    prompt, params = plain.encode(PROMPT), SamplingParams(temperature=0.8, seed=3, max_tokens=12)
    expected = plain.generate(PROMPT, params)[0].outputs[0].token_ids
    body = {"prompt": PROMPT, "temperature": 0.8, "seed": 3, "max_tokens": 12}
    assert "token_ids" not in live.ask(**body)["choices"][0]
    choice = live.ask(**body, return_token_ids=True)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, expected)
    chunks = [c["choices"][0] for c in live.events(**body, return_token_ids=True)]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert [t for c in chunks for t in c.get("token_ids", ())] == expected
    messages = [{"role": "user", "content": "sort"}]
    chat = {"messages": messages, "temperature": 0.8, "seed": 3, "max_tokens": 12, "return_token_ids": True}
    whole = live.ask("/v1/chat/completions", **chat)
    tokens = live.ask("/tokenize", messages=messages)["tokens"]
    assert whole["prompt_token_ids"] == tokens
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"]
    parts = live.events("/v1/chat/completions", **chat)
    assert parts[0]["prompt_token_ids"] == tokens
    assert [t for c in parts for t in c["choices"][0].get("token_ids", ())] == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_served_answer_is_written_again_from_its_fingerprint(
    live: Live, plain: LLM, tmp_path: Path, sampled: bool
) -> None:
    drawn = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "bad_words": ["import"], "n": 2}
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, **(drawn if sampled else {"temperature": 0})}
    assert "fingerprint" not in live.ask(**body)["choices"][0]
    asked = {**body, "return_fingerprint": True, "return_token_ids": True}
    answer = live.ask(**asked, logprobs=1)
    file = tmp_path / "answer.json"
    for choice in answer["choices"]:
        file.write_text(json.dumps(choice["fingerprint"]))
        recorded = read_fingerprint(file)
        assert rewrite(recorded, plain) == (choice["token_ids"], None)
    file.write_text(json.dumps(answer))
    assert read_fingerprint(file).json_line() == Fingerprint(**answer["choices"][0]["fingerprint"]).json_line()
    ends = {c["choices"][0]["index"]: c["choices"][0].get("fingerprint") for c in live.events(**asked)}
    assert [ends[i] for i in sorted(ends)] == [choice["fingerprint"] for choice in answer["choices"]]


def test_an_answer_that_went_on_has_the_fingerprint_of_the_whole_text(live: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 3, "return_fingerprint": True}
    whole = live.ask(**body, return_token_ids=True)["choices"][0]
    again = live.ask(**body, continued_tokens=whole["token_ids"][:5])["choices"][0]
    assert again["fingerprint"] == whole["fingerprint"]


@pytest.mark.parametrize("body", [{"max_tokens": 0, "echo": True}, {"structured_outputs": {"regex": "[a-z]+"}}])
def test_a_fingerprint_that_cannot_be_made_is_refused_before_the_text(live: Live, body: dict) -> None:
    if "structured_outputs" in body:
        pytest.importorskip("llguidance")
    body |= {"prompt": PROMPT, "return_fingerprint": True}
    response = httpx.post(live.url + "/v1/completions", json=body)
    assert response.status_code == 400
    assert "leave out return_fingerprint" in response.json()["error"]["message"]


def test_the_pieces_of_a_stream_are_its_text(live: Live) -> None:
    """Draft tokens are marked, as many as were accepted."""
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_pieces": True}
    *chunks, end = live.events(**body, stream_options={"include_usage": True})
    pieces = [piece for c in chunks for piece in c["choices"][0].get("pieces", ())]
    assert "".join(text for text, _ in pieces) == "".join(c["choices"][0]["text"] for c in chunks)
    accepted = end["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert 0 < accepted - 2 <= sum(drafted for _, drafted in pieces) <= accepted  # a token may have no text of its own


def test_metrics_of_an_answer_have_the_names_and_shapes_that_vllms_clients_read(live: Live) -> None:
    """The rules are those of AIPerf 0.13, which drops every record that breaks one, and of vLLM's documentation."""
    for own in ({}, {"num_speculative_tokens": 3}, {"method": "suffix"}):
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **own}
        answer = live.ask(**body, detailed_metrics=True)
        found, spec = answer["metrics"], answer["metrics"]["speculative_decoding"]
        assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1
        assert {int(k): len(v) for k, v in spec["acceptance_histogram_by_draft_length"].items()} == {
            k: k + 1 for k in set(spec["per_step_drafted"])
        }
        assert isinstance(spec["draft_acceptance_rate"], float)
        assert isinstance(spec["mean_acceptance_length"], float)
        assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
        times = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
        assert all(isinstance(found[name], float) for name in times)
        assert found["queue_time_ms"] == pytest.approx(1000 * found["time_in_queue"])
        whole = found["queue_time_ms"] + found["time_to_first_token_ms"] + found["generation_time_ms"]
        assert whole == pytest.approx(1000 * found["e2e_latency"])
        assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / 15)
    two = live.ask(prompt=PROMPT, max_tokens=2, n=2)["metrics"]
    assert two["mean_itl_ms"] is two["speculative_decoding"] is None
    assert live.ask(prompt=PROMPT, max_tokens=1)["metrics"]["mean_itl_ms"] is None


def test_prometheus_reads_vllms_labels_the_load_and_the_cache_configuration(live: Live) -> None:
    """Five requests on two slots: two run, three wait. The endpoint picker of the Gateway API reads these names."""

    def samples() -> dict[str, float]:
        lines = httpx.get(live.url + "/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:")}

    body = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True}
    seen = list[dict[str, float]]()
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(live.ask, **body) for _ in range(5)]
        while not all(answer.done() for answer in answers):
            seen.append(samples())
            sleep(0.02)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    load = [[one[f'vllm:{name}{{engine="0",model_name="code"}}'] for name in names] for one in (*seen, samples())]
    assert max(running for running, _, _ in load) == 2
    assert max(waiting for running, waiting, _ in load if running == 2) == 3  # before, four may wait for a moment
    assert 0 < max(used for _, _, used in load) <= 1
    assert load[-1] == [0, 0, 0]
    own = ("vllm:cache_config_info", "vllm:http_requests_total")
    assert all('model_name="code"' in name and 'engine="0"' in name for name in samples() if not name.startswith(own))
    [(info, value)] = [(name, value) for name, value in samples().items() if name.startswith(own[0])]
    blocks = f'num_gpu_blocks="{live.service.engine.kv_limit // 16}"'
    assert all(label in info for label in ('block_size="16"', blocks, 'enable_prefix_caching="True"'))
    assert value == 1


def test_what_needs_a_tokenizer_says_so_as_in_the_library() -> None:
    bare = replace(load("builtin:code"), tokenizer=None)
    llm = LLM(bare, speculative_config={"method": "prediction"}, any_method=True)
    fields = {"prediction": ("x = 1", {"type": "content", "content": "x = 1"}), "bad_words": (["self"], ["self"])}
    said = dict[str, str]()
    for name, (value, _) in fields.items():
        with pytest.raises(ValueError, match="need") as error:
            llm.generate({"prompt_token_ids": [5]}, SamplingParams(**{name: value}))
        said[name] = str(error.value)
    with serving(llm) as live:
        for name, (_, value) in fields.items():
            response = httpx.post(live.url + "/v1/completions", json={"prompt": [5], "max_tokens": 2, name: value})
            assert (response.status_code, response.json()["error"]["message"]) == (400, said[name])
        assert live.ask(prompt=[5], max_tokens=2)["usage"]["completion_tokens"] == 2


def test_no_answer_tells_the_folder_of_a_model() -> None:
    path = "/srv/secret/small.Q8_0.gguf"
    llm = LLM(replace(load("builtin:code"), name=path), any_method=True)
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = None
    user = [{"role": "user", "content": "x"}]
    asked: list[tuple[str, dict | None, int]] = [
        ("/v1/models", None, 200), ("/v1/models/other", None, 404), ("/metrics", None, 200),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, 200), ("/v1/chat/completions", {"messages": user}, 400),
    ]  # fmt: skip
    with serving(llm, ServeOptions(model="small.Q8_0")) as live:
        for where, body, status in asked:
            got = httpx.get(live.url + where) if body is None else httpx.post(live.url + where, json=body)
            assert got.status_code == status
            assert "small.Q8_0" in got.text
            assert "secret" not in got.text, got.text
        assert httpx.post(live.url + "/v1/completions", json={"prompt": "x", "model": path}).status_code == 404
