"""The page at /: open, without a word of the model, and no 404 in the log of a server that a browser visits."""

from __future__ import annotations

import httpx
import pytest

from outrider.serve.options import ServeOptions
from tests.support.serving import builtin, serving


def test_a_browser_finds_a_page_and_leaves_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with serving(builtin(), ServeOptions(model="secret-model", api_key=["secret"])) as live, caplog.at_level("INFO"):
        page = httpx.get(live.url)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
        assert "connect-src 'self'" in page.text
        assert "secret-model" not in page.text
        assert '"key": true' in page.text
        script = httpx.get(f"{live.url}/home.js")
        assert script.headers["content-type"].startswith("text/javascript")
        assert "secret-model" not in script.text
        head = httpx.head(live.url)
        assert (head.status_code, head.content) == (200, b"")
        assert httpx.get(f"{live.url}/favicon.ico").status_code == 204
        assert httpx.get(f"{live.url}/v1/models").status_code == 401
        for path in ("/openapi.json", "/metrics", "/version"):  # what the page links
            assert httpx.get(live.url + path).status_code == 401
            assert httpx.get(live.url + path, auth=("any", "secret")).status_code == 200
        assert "/" not in httpx.get(f"{live.url}/openapi.json", auth=("any", "secret")).json()["paths"]
    assert not [record for record in caplog.records if " 404 " in record.getMessage()]
