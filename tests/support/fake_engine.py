"""A server that behaves as an engine's, as a real process: it parses options, becomes healthy, streams, and can misbehave.

    python fake_engine.py --port 8000 --host 127.0.0.1 [--speculative-config JSON | --spec-type T ...] [--bad-at METHOD]

Each event of the stream has as many tokens as the setting would accept, and each takes 5 ms. So a setting is as fast as its
length says, up to 8 tokens; longer drafts take longer. Words of `--bad`: crash (ends before it answers), deaf (never healthy),
stubborn (ignores SIGTERM, and so does its child), other (another text), error (HTTP 500), drafts (drafts in plain decoding too).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEXT = [f"w{n} " for n in range(64)]
BEST = 8
SLEEP = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('asleep', flush=True); time.sleep(600)"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--bad", default="", help="METHOD:WORD")
    args = parser.parse_args()
    config: dict[str, Any] = args.speculative_config or {"method": "plain", "num_speculative_tokens": 0}
    method, _, bad = args.bad.partition(":")
    bad = bad if method == config["method"] else ""
    if bad == "crash":
        sys.exit("no memory for this setting")
    if bad == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE, process_group=0)
        assert child.stdout is not None
        child.stdout.readline()
        print(f"child {child.pid}", flush=True)
    length = config["num_speculative_tokens"] or (1 if bad == "drafts" else 0)
    counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, text: str, kind: str = "application/json", status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer("", status=503 if bad == "deaf" else 200)
            elif self.path == "/v1/models":
                self.answer(json.dumps({"data": [{"id": "fake"}]}))
            else:
                lines = [f'vllm:spec_decode_num_{k}_total{{engine="0"}} {v}.0\n' for k, v in counts.items()]
                for j in range(length):  # a draft keeps the same number of tokens each time
                    kept = counts["drafts"] if j < min(length, BEST) // 2 else 0
                    lines.append(
                        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{j}"}} {kept}.0\n'
                    )
                self.answer("".join(lines))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if bad == "error" and body["prompt"].startswith("two"):
                self.answer(json.dumps({"error": {"message": "out of blocks"}}), status=500)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            words = [body["prompt"][:3], *TEXT[: body["max_tokens"] - 1]]
            if bad == "other":
                words[-1] = "else"
            together = 1 + min(length, BEST) // 2
            for at in range(0, len(words), together):
                time.sleep(0.005 * (1 + max(0, length - BEST) / BEST))
                counts["drafts"] += length > 0
                counts["draft_tokens"] += length
                counts["accepted_tokens"] += (together - 1) * (length > 0)
                last = at + together >= len(words)
                self.event(
                    {
                        "choices": [
                            {"text": "".join(words[at : at + together]), "finish_reason": "length" if last else None}
                        ]
                    }
                )
            self.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(words)}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, data: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

    print(f"serving {config}", flush=True)
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
