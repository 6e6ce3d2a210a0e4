"""Who may ask a server: hosts, origins, keys; what the log says of it; and whose request it is."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse

from outrider.core.files import public_name
from outrider.serve import logs
from outrider.serve.guard import Guard, guards
from outrider.serve.metrics import Metrics
from outrider.serve.options import ServeOptions, served_name

LOCAL, ANY = ServeOptions(model="m"), ServeOptions(model="m", host="0.0.0.0")


async def owner(scope: Any, receive: Any, send: Any) -> None:
    await JSONResponse({"owner": scope["state"]["owner"]})(scope, receive, send)


def ask(
    settings: ServeOptions, path: str = "/v1/models", method: str = "GET", client: str = "127.0.0.1", **headers: str
) -> httpx.Response:
    """The answer of a guard. Underscores in the names of headers stand for dashes."""

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(Guard(owner, settings, Metrics("x", "m")), client=(client, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as asking:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return await asking.request(method, path, headers=sent)

    return asyncio.run(go())


def made(**given: Any) -> ServeOptions:
    """The settings of options."""
    return ServeOptions.model_validate({"model": "m", **given})


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("error", {}).get("code")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/dashboard", "/metrics", "/health", "/tokenize"])
def test_a_keyless_server_of_this_machine_answers_to_its_own_names_only(path: str) -> None:
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "localhost."):
        assert ask(LOCAL, path, host=host).status_code == 200, host
    for host in ("evil.example:8000", "localhost.evil.example", "", "[", "127.0.0.1.evil.example", "10.0.0.7"):
        got = ask(LOCAL, path, host=host)
        assert code(got) == (403, "host_not_allowed"), host
        assert "--allowed-host" in got.text


def test_a_wrong_host_or_origin_is_refused_in_the_form_of_each_protocol() -> None:
    for headers, words in (
        ({"host": "evil.example"}, "--allowed-host"),
        ({"origin": "http://evil.example"}, "--cors-origin"),
    ):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            got = ask(LOCAL, path, "POST", **headers)
            assert (got.status_code, got.json()["type"], got.json()["error"]["type"]) == (
                403,
                "error",
                "permission_error",
            )
            assert words in got.json()["error"]["message"]
        for path in ("/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/ps", "/api/version", "/api/embed"):
            got = ask(LOCAL, path, "GET", **headers)
            assert (got.status_code, list(got.json())) == (403, ["error"])
            assert words in got.json()["error"]


def test_which_servers_ask_for_their_names() -> None:
    def hosts(**given: Any) -> tuple[str, ...]:
        return made(**given).hosts

    assert set(hosts(host="127.0.0.1")) == {"localhost", "127.0.0.1", "::1"} == set(hosts(host="::1"))
    assert "evil.example" in hosts(host="localhost", allowed_host=["Evil.example"])
    assert hosts(host="127.0.0.1", api_key="k") == hosts(host="0.0.0.0") == ()
    assert "llm.example" in hosts(host="0.0.0.0", allowed_host=["llm.example"], api_key="k")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_page_of_another_site_is_refused_where_no_key_is_asked_for(method: str) -> None:
    for settings in (LOCAL, ANY):
        for origin in (
            "http://evil.example",
            "null",
            "http://localhost:3000",
            "https://127.0.0.1:8000",
            "localhost:8000",
            "http://[",
        ):
            assert code(ask(settings, method=method, origin=origin)) == (403, "cross_origin"), origin
        assert code(ask(settings, method=method, sec_fetch_site="cross-site", sec_fetch_mode="no-cors"))[0] == 403
        assert ask(settings, method=method, origin="http://localhost:8000").status_code == 200
    assert ask(LOCAL, method=method).status_code == 200
    assert ask(LOCAL, sec_fetch_site="cross-site", sec_fetch_mode="navigate").status_code == 200  # a link
    for cors in ("http://evil.example", "*"):
        allowed = LOCAL.with_(cors_origin=[cors])
        assert ask(allowed, method=method, origin="http://evil.example").status_code == 200


def test_a_browser_sends_the_key_of_pages_by_itself_so_their_origin_counts_with_a_key_too() -> None:
    settings = ServeOptions(model="m", api_key=["k"])
    basic = "Basic " + base64.b64encode(b"any:k").decode()
    for path in ("/dashboard", "/dashboard/events"):
        assert code(ask(settings, path, authorization=basic, origin="http://evil.example")) == (403, "cross_origin")
        assert ask(settings, path, authorization=basic, origin="http://localhost:8000").status_code == 200
    assert ask(settings, authorization="Bearer k", origin="http://evil.example").status_code == 200


def test_there_may_be_several_keys_and_each_is_an_owner() -> None:
    settings = ServeOptions(model="m", api_key=["one", "two"])
    assert ask(settings, authorization="Bearer one").json() == {"owner": "key 7692c3ad3540bb80"}
    assert ask(settings, authorization="Bearer two").json() == {"owner": "key 3fc4ccfe745870e2"}
    for wrong in ("Bearer three", "Bearer onetwo", "Bearer one,two", "Bearer ", "one"):
        assert code(ask(settings, authorization=wrong)) == (401, "invalid_api_key")
    assert made(api_key=["a", "b"]).api_key == ["a", "b"]
    with pytest.raises(ValueError, match="is empty"):
        made(api_key=["a", " "])


def test_without_a_key_an_address_is_an_owner_and_only_a_front_may_say_another() -> None:
    said = {"x_outrider_owner": "key 7"}
    assert ask(ANY, client="203.0.113.5", **said).json() == {"owner": "203.0.113.5"}
    assert ask(ANY, client="2001:db8::5").json() == ask(ANY, client="2001:db8::6").json()
    assert ask(ANY.with_(replica_name="r0"), client="203.0.113.5", **said).json() == {"owner": "key 7"}


def test_the_key_is_compared_in_constant_time_and_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    settings = ServeOptions(model="m", api_key=["s3cret"])
    for key in ("s", "s3creT", "x" * 5000, "Basic s3cret"):
        wrong = ask(settings, authorization=key if " " in key else f"Bearer {key}")
        assert (wrong.headers["www-authenticate"], "s3cret" in wrong.text) == ("Bearer", False)
    assert compared == [(32, 32)] * 4  # digests, of one length whatever was sent
    assert ask(settings, "/health").status_code == 200


@pytest.mark.parametrize("origins", [[], ["http://evil.example"]])
def test_only_pages_of_a_named_origin_are_told_that_they_may_ask(origins: list[str]) -> None:
    settings = ServeOptions(model="m", host="0.0.0.0", api_key=["k"], cors_origin=origins)
    app = Starlette(middleware=guards(settings, Metrics("x", "m")))
    asking = {"origin": "http://evil.example", "access-control-request-method": "POST"}

    async def preflight() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.options("/v1/models", headers=asking)

    assert asyncio.run(preflight()).headers.get("access-control-allow-origin") == (origins or [None])[0]


def test_a_path_cannot_forge_a_line_of_the_log(tmp_path: Path) -> None:
    handler = logs.start(tmp_path / "log", lambda: None)
    try:
        for path in (
            "/x%0a2026-11-23 INFO fake POST /v1/admin 200",
            "/%1b]0;owned%07",
            "/%e2%80%aex",
            "/" + "a" * 5000,
        ):
            ask(ServeOptions(model="m", api_key=["k"]), path)
        try:
            raise ValueError("first\n2026-11-23 INFO fake")
        except ValueError:
            logs.log.exception("a request\nfailed")
    finally:
        logging.getLogger("outrider").removeHandler(handler)
        handler.close()
    text = (tmp_path / "log").read_text()
    assert all(c.isprintable() or c == "\n" for c in text)
    assert max(map(len, text.splitlines())) < 400
    records = [line for line in text.splitlines() if not line.startswith("    ")]
    assert len(records) == 5
    assert not any(line.startswith("2026-11-23 INFO") for line in text.splitlines())
    assert "/x\\n2026-11-23 INFO fake" in text


def test_the_name_of_a_file_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret" / "small.Q8_0.gguf"
    file.parent.mkdir()
    file.write_bytes(b"")
    monkeypatch.chdir(file.parent)
    for name in (str(file), "small.Q8_0.gguf", "./small.Q8_0.gguf", "../secret/small.Q8_0.gguf"):
        settings = made(model=name)
        assert settings.model_name == "small.Q8_0"
        assert public_name(name) == "small.Q8_0.gguf"
    assert served_name(str(tmp_path / "secret")) == served_name(".") == "secret"
    for odd in ("a" * 300, "~no_such_user/model", "a\0b"):
        assert public_name(odd) == odd, "no file can have this name, and it is no error"
