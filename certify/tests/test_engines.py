"""How an engine's server is recognised, and how its speculation is turned off and on."""

from __future__ import annotations

import pytest
from broken import ToyEngine
from toy_server import PROMPTS, ToyServer, certified, subject

from outrider_certify.certificate import Conclusion
from outrider_certify.seeded import Seeded
from outrider_certify.subject import SamplingParams, TextRequest, Unsupported
from outrider_certify.subjects import engines
from outrider_certify.two_sample import TwoSample

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_server_without_a_switch_says_so_and_is_not_asked_for_ever() -> None:
    toy = subject(ToyServer(ToyEngine(), logprobs=False), off_body=None)
    assert certified(TwoSample(toy, length=16)).conclusion is Conclusion.CANNOT_TELL
    part = certified(Seeded(toy, length=16))
    assert part.conclusion is Conclusion.CANNOT_TELL
    assert any("add --plain-url" in line for line in part.skipped)


@pytest.mark.parametrize(("switch", "found"), [("disable_spec_decode", True), ("other", False)])
def test_an_engine_is_told_by_its_own_field_not_to_speculate_if_that_works(switch: str, *, found: bool) -> None:
    server = ToyServer(ToyEngine())
    server.owner, server.switch = "outrider", switch
    toy = subject(server, off_body=None)
    assert toy.properties["without speculation"] == ('{"disable_spec_decode": true}' if found else "not known")
    part = certified(Seeded(toy, length=16, rounds=1))
    assert part.conclusion is (Conclusion.EXACT_TOKENS if found else Conclusion.CANNOT_TELL)


@pytest.mark.parametrize(
    ("owner", "name"),
    [("vllm", "vLLM"), ("sglang", "SGLang"), ("tensorrt_llm", "TensorRT-LLM"), ("organization_owner", "LM Studio")],
)
def test_an_engine_is_recognised_and_its_way_to_plain_decoding_is_told(owner: str, name: str) -> None:
    server = ToyServer(ToyEngine())
    server.owner = owner
    made = subject(server, off_body=None)
    assert made.properties["engine"] == name
    with pytest.raises(Unsupported, match=f"{name}: "):
        made.plain([TextRequest(PROMPTS[0], SamplingParams())])


def test_ollama_and_llama_cpp_are_recognised_by_their_own_routes() -> None:
    said = {"/api/version": {"version": "0.12"}, "/api/tags": {"models": []}}
    assert engines.recognised(lambda path: said.get(path, {})) is engines.OLLAMA
    assert (
        engines.recognised(lambda path: {"default_generation_settings": {}} if path == "/props" else {})
        is engines.LLAMA
    )
    assert engines.recognised(lambda path: {}) is engines.UNKNOWN


def test_fields_that_turn_speculation_on_are_sent_on_that_side_only() -> None:
    server = ToyServer(ToyEngine())
    made = subject(server, off_body=None, on_body={"draft_model": "small"})
    server.requests.clear()
    request = TextRequest(PROMPTS[0], SamplingParams(max_tokens=2))
    made.generate([request], made.variants()[0])
    made.plain([request])
    assert ["draft_model" in body for body in server.requests] == [True, False]
