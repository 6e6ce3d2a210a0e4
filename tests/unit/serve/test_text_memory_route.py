"""A server with a memory of texts: each key and user has its own, answers are equal, and a client can delete its texts."""

from __future__ import annotations

from pathlib import Path

import httpx
from serving import builtin, serving

from outrider.serve.options import ServeOptions

SETTINGS = ServeOptions(model="code", host="0.0.0.0", api_key=["one", "two"], memory_dir="given")


def test_a_client_drafts_from_its_own_texts_and_deletes_them(tmp_path: Path) -> None:
    llm = builtin(2, {"method": "suffix"}, memory_dir=tmp_path)
    with serving(llm, SETTINGS) as live, httpx.Client(base_url=live.url) as http:

        def ask(key: str, user: str | None) -> tuple[str, int]:
            body = {"prompt": "def mean(values):\n", "max_tokens": 40, "temperature": 0, "user": user}
            out = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).json()
            assert llm.runtime.text_memory is not None
            llm.runtime.text_memory.folder.flush()
            return out["choices"][0]["text"], out["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]

        def deleted(key: str, **query: str) -> int:
            return http.delete("/v1/memory", params=query, headers={"authorization": f"Bearer {key}"}).status_code

        text, alone = ask("one", "a")
        for key, user, more in (("one", "a", True), ("two", "a", False), ("one", "b", False), ("one", None, False)):
            again, accepted = ask(key, user)
            assert again == text
            assert (accepted > alone) == more, (key, user)
        assert deleted("one") == deleted("two", user="a") == 200
        assert ask("one", "a")[1] > alone
        assert deleted("one", user="a") == 200
        assert ask("one", "a")[1] == alone
        assert deleted("three") == 401


def test_no_one_deletes_what_all_share(tmp_path: Path) -> None:
    with serving(
        builtin(2, {"method": "suffix"}, memory_dir=tmp_path, memory_by="all"), SETTINGS.with_(memory_by="all")
    ) as live:
        assert httpx.delete(live.url + "/v1/memory", headers={"authorization": "Bearer one"}).status_code == 404
