"""Continue's command line: one message through its providers for three protocols, with its tools. Run where npm installed it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ask_common import MODEL, URL

CN = Path(sys.argv[3]) / "node_modules" / ".bin" / "cn"
said = list[str]()
for provider, base in (("openai", URL + "/v1"), ("ollama", URL), ("anthropic", URL + "/v1")):
    options = {"temperature": 0, "maxTokens": 24}
    model = {"name": provider, "provider": provider, "model": MODEL, "apiBase": base, "apiKey": "x", "roles": ["chat"]}
    config = {
        "name": "ours",
        "version": "0.0.1",
        "schema": "v1",
        "models": [model | {"defaultCompletionOptions": options}],
    }
    Path("config.yaml").write_text(json.dumps(config))
    environment = os.environ | {"HOME": os.getcwd(), "CONTINUE_TELEMETRY_ENABLED": "0"}
    command = [CN, "--config", "config.yaml", "-p", "Say hello in one word."]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said.append(done.stdout.strip())
assert said[0]
assert said == [said[0]] * 3, said
print("a message with tools through three protocols has one text")
