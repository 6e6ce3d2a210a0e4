"""The server as its clients see it: OpenAI's own library against a live one, every field, every error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import httpx
import openai
import pytest
from serving import Live, builtin, serving

from outrider import LLM, SamplingParams

COUNT = 32  # mixed requests
PROMPTS = ["def quicksort(xs):\n", "import os\nimport sys\n\n\nclass Config:\n", "for i in range(10):\n    print(i)\n"]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin()) as live:
        yield live


@pytest.fixture(scope="module")
def plain() -> LLM:
    return builtin(1, None)


def error(response: httpx.Response) -> dict:
    assert set(response.json()) == {"error"}
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def test_mixed_requests_at_once_have_the_texts_of_plain_decoding_one_by_one(live: Live, plain: LLM) -> None:
    draw = random.Random(4)
    bodies = []
    for seed in range(COUNT):
        body = {
            "prompt": draw.choice(PROMPTS) * draw.choice([1, 1, 3]),
            "max_tokens": draw.randrange(1, 16),
            "temperature": draw.choice([0, 0.7, 1.1]),
            "seed": seed,
        }
        for name, values in (
            ("top_p", [0.9]),
            ("top_k", [20]),
            ("min_p", [0.05]),
            ("repetition_penalty", [1.2]),
            ("presence_penalty", [0.5]),
            ("frequency_penalty", [0.5]),
            ("logit_bias", [{"11": 2.0}]),
            ("min_tokens", [1]),
            ("stop", [["self", "\n\n"]]),
            ("bad_words", [["self", "def"]]),
            ("structured_outputs", [{"regex": r"[a-c]{3}(-\d+){1,3}"}, {"choice": ["yes", "yesterday"]}]),
        ):
            if draw.random() < 0.25:
                body[name] = draw.choice(values)
        bodies.append(body)
    with serving(plain) as alone:
        expected = [alone.ask(**body)["choices"][0] for body in bodies]
    kinds = {"structured_outputs" in body for body in bodies}
    assert kinds == {True, False}
    drafting = [{}, {}, {"disable_spec_decode": True}, {"num_speculative_tokens": 8}, {"method": "ngram"}]
    drafting += [
        {"method": "suffix"},
        {"method": "none"},
        {"prediction": {"type": "content", "content": PROMPTS[0]}},
    ]

    async def all_at_once() -> list[tuple[str, str]]:
        found = {}
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="any", max_retries=9) as client:

            async def one(number: int) -> None:
                body, extra = dict(bodies[number]), draw.choice(drafting)
                own = {"top_k", "min_p", "repetition_penalty", "min_tokens", "bad_words", "structured_outputs"}
                extra = {**extra, **{k: body.pop(k) for k in own & set(body)}}
                if number % 2:
                    out = await client.completions.create(model="code", **body, extra_body=extra)
                    found[number] = (out.choices[0].text, out.choices[0].finish_reason)
                    return
                text, finish = "", None
                async for chunk in await client.completions.create(model="code", **body, extra_body=extra, stream=True):
                    text += chunk.choices[0].text
                    finish = chunk.choices[0].finish_reason or finish
                found[number] = (text, finish)

            await asyncio.gather(*(one(n) for n in draw.sample(range(COUNT), COUNT)))
        return [found[n] for n in range(COUNT)]

    assert asyncio.run(all_at_once()) == [(one["text"], one["finish_reason"]) for one in expected]


def test_a_request_chooses_its_own_speculation(live: Live) -> None:
    base = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "detailed_metrics": True}
    usual = live.post(**base).json()
    spec = usual["metrics"]["speculative_decoding"]
    assert max(spec["per_step_drafted"]) == 4
    assert sum(spec["per_step_accepted"]) == spec["num_accepted_draft_tokens"]
    none = live.post(**base, disable_spec_decode=True).json()
    assert none["metrics"]["speculative_decoding"] is None
    assert none["choices"][0]["text"] == usual["choices"][0]["text"]
    two = live.post(**base, num_speculative_tokens=2).json()["metrics"]["speculative_decoding"]
    assert (max(two["per_step_drafted"]), two["num_spec_tokens"]) == (2, 2)
    told = live.post(**base, prediction={"type": "content", "content": usual["choices"][0]["text"]}).json()
    details = told["usage"]["completion_tokens_details"]
    assert told["choices"][0]["text"] == usual["choices"][0]["text"]
    assert details["accepted_prediction_tokens"] > 12
    assert told["usage"]["completion_tokens"] == 24 + details["rejected_prediction_tokens"]
    wrong = live.post(**base, prediction={"type": "content", "content": "zebra " * 30}).json()
    assert wrong["choices"][0]["text"] == usual["choices"][0]["text"]
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_several_texts_have_the_logprobs_of_the_library_and_a_prompt_is_read_once(live: Live, plain: LLM) -> None:
    body = {"prompt": [plain.encode(p) for p in PROMPTS[:2]], "n": 2, "seed": 4, "max_tokens": 6, "logprobs": 2}
    answer = live.post(**body, echo=True).json()
    params = SamplingParams(n=2, seed=4, max_tokens=6, logprobs=2)
    expected = [o for p in PROMPTS[:2] for o in plain.generate(p, params)[0].outputs]
    assert [c["text"] for c in answer["choices"]] == [PROMPTS[i // 2] + o.text for i, o in enumerate(expected)]
    for choice, out in zip(answer["choices"], expected, strict=True):
        assert out.logprobs is not None
        own = [x[t] for t, x in zip(out.token_ids, out.logprobs, strict=True)]
        assert choice["logprobs"]["token_logprobs"][-len(own) :] == own
        assert (len(choice["logprobs"]["tokens"]), choice["seed"]) == (
            len(body["prompt"][choice["index"] // 2]) + len(own), out.seed,
        )  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    content = live.post("/v1/chat/completions", **chat).json()["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [3] * len(content)
    assert all(t["top_logprobs"][0]["logprob"] >= t["logprob"] for t in content)
    assert all(bytes(t["bytes"]).decode() == t["token"] for t in content)
    long = "".join(f"value_{i} = {i}\n" for i in range(60))
    first, second = (live.post(prompt=long, max_tokens=2, temperature=0).json() for _ in range(2))
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= second["usage"]["prompt_tokens"] - cached <= 17


def test_the_other_routes(live: Live, plain: LLM) -> None:
    tokens = live.post("/tokenize", prompt=PROMPTS[0], return_token_strs=True).json()
    assert tokens["tokens"] == plain.encode(PROMPTS[0])
    assert (tokens["count"], "".join(tokens["token_strs"])) == (len(tokens["tokens"]), PROMPTS[0])
    assert live.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()["count"] > 3
    assert live.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": PROMPTS[0]}
    assert httpx.get(live.url + "/health").json()["status"] == "ok"
    for asked, kept in (("mine-7", True), ("a b;c", False)):
        named = httpx.get(live.url + "/version", headers={"x-request-id": asked})
        assert (named.headers["x-request-id"] == asked) == kept
        assert named.json()["version"]


def test_metrics_have_vllms_names_behind_the_prefix(live: Live) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(live.url + "/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.replace('{engine="0",model_name="code"}', ""): float(value) for name, value in pairs}

    before = read()
    usage = live.post(prompt=PROMPTS[2], max_tokens=20, temperature=0, ignore_eos=True).json()
    after, spec = read(), usage["metrics"]["speculative_decoding"]

    def grew(name: str) -> float:
        return after[f"outrider:{name}"] - before.get(f"outrider:{name}", 0)

    assert grew("generation_tokens_total") == 20
    assert grew("prompt_tokens_total") == usage["usage"]["prompt_tokens"]
    assert grew("spec_decode_num_draft_tokens_total") == spec["num_draft_tokens"]
    assert grew("spec_decode_num_accepted_tokens_total") == spec["num_accepted_draft_tokens"]
    assert grew("spec_decode_num_drafts_total") == sum(
        1 for k, v in spec["acceptance_histogram_by_draft_length"].items() if int(k) for _ in range(sum(v))
    )
    per = [
        after.get(
            f'outrider:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="code",position="{i}"}}', 0
        )
        for i in range(4)
    ]
    assert per == sorted(per, reverse=True)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grew(name + "_count") == 1
    assert grew("inter_token_latency_seconds_count") == spec["num_spec_steps"] - 1
    assert after["outrider:num_requests_running"] == after["outrider:num_requests_waiting"] == 0
    assert 0 <= after["outrider:kv_cache_usage_perc"] <= 1


def test_errors_of_http_have_the_same_shape(live: Live) -> None:
    url = live.url + "/v1/completions"
    assert error(httpx.post(url, content=b"{nonsense"))["type"] == "invalid_request_error"
    typed = {"content-type": "application/json"}
    assert "the body is empty" in error(httpx.post(url, headers=typed))["message"]
    assert "the body is no JSON object" in error(httpx.post(url, content=b"[1]", headers=typed))["message"]
    assert error(httpx.get(url))["message"].startswith("/v1/completions does not take GET")
    assert httpx.head(url).status_code == 405
    assert error(httpx.get(live.url + "/nowhere"))["type"] == "not_found_error"
    other = live.post(model="gpt-5", prompt="x")
    assert (other.status_code, error(other)["code"]) == (404, "model_not_found")
    large = httpx.post(url, content=b" " * (5 << 20))
    assert (large.status_code, error(large)["code"]) == (413, "request_too_large")
