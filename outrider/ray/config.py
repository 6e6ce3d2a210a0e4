"""The configuration file of `serve run` and `serve deploy`, for git."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import yaml

from outrider.ray.options import DeployOptions

HEAD = """\
# Replicas of outrider on Ray Serve. Try it: serve run FILE. Deploy or update it on a cluster: serve deploy FILE.
# Two applications: replicas of the engine are replaced one after the other, and the front with its streams stays.
"""


def serve_config(options: DeployOptions, name: str, host: str, port: int) -> str:
    """The file, as YAML. The API key is left out: it does not belong into git."""
    args = options.model_dump(mode="json", exclude_defaults=True) | {"engines": options.engines}
    args.pop("api_key", None)
    found: dict[str, Any] = {
        "http_options": {"host": host, "port": port},
        "applications": [
            {"name": options.engines, "route_prefix": None, "import_path": "outrider.ray:build_engines", "args": args},
            # a copy, or YAML would refer to the first by an anchor
            {"name": name, "route_prefix": "/", "import_path": "outrider.ray:build_front", "args": deepcopy(args)},
        ],
    }
    return HEAD + yaml.safe_dump(found, sort_keys=False)
