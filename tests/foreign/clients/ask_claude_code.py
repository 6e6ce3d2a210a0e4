"""Claude Code: two conversations without a terminal, in a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ask_common import MODEL, URL, raw

CLAUDE = Path(sys.argv[3]) / "node_modules" / ".bin" / "claude"
environment = {"PATH": os.environ["PATH"], "HOME": os.getcwd(), "ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "none"}
environment |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
environment |= {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64"}
assert raw("/v1/messages", messages=[{"role": "user", "content": "hello"}], max_tokens=4)["content"]
found = list[dict]()
for prompt in ("Say hello in one word.", "Count to three."):
    command = [CLAUDE, "-p", prompt, "--model", MODEL, "--output-format", "json"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found.append(json.loads(done.stdout))
assert all(answer["is_error"] is False and answer["usage"]["output_tokens"] > 0 for answer in found), found
read = [answer["usage"]["cache_read_input_tokens"] for answer in found]
print(f"two conversations; the second found {read[1]} of its tokens in the cache")
