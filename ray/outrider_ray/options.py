"""What `outrider deploy`, `serve run` and a YAML file say about replicas."""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from functools import cached_property
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from outrider.serve.options import ServeOptions, answered_hosts, panel, setting, shown

_HEAD = """\
# Replicas of outrider on Ray Serve. Try it: serve run FILE. Deploy or update it on a cluster: serve deploy FILE.
# Two applications: replicas of the engine are replaced one after the other, and the front with its streams stays.
"""


class DeployOptions(ServeOptions):
    """The options of a server, and how many of it there are.

    engines: the Serve application of the replicas. listen: host and port where the fronts listen themselves; None for Ray's
    proxies.
    """

    replicas: int | None = setting(None, "Replicas", "A fixed number; without it, 1.", ge=1)
    min_replicas: int | None = setting(None, "Replicas", "The number follows the load, from this.", ge=1)
    max_replicas: int | None = setting(None, "Replicas", "To this.", ge=1)
    target_requests: float | None = setting(
        None, "Replicas", "Requests of one replica to aim at, waiting ones included; without it, --max-num-seqs.", gt=0
    )
    upscale_delay: float = setting(10.0, "Replicas", "Seconds of load before a replica is added.", ge=0)
    downscale_delay: float = setting(300.0, "Replicas", "Seconds without load before one is removed.", ge=0)
    cpus: float = setting(1.0, "Replicas", "CPUs of one replica.", gt=0)
    gpus: float = setting(0.0, "Replicas", "GPUs of one replica.", ge=0)
    fronts: int = setting(1, "Replicas", "Processes that clients talk to.", ge=1)
    prefix_weight: float = setting(
        4.0, "Replicas", "Waiting requests that a prompt in the prefix cache is worth; 0 looks at load only.", ge=0
    )
    patience: float = setting(60.0, "Replicas", "Seconds that a request waits for a replica that lives.", gt=0)
    engines: str = "outrider-engines"
    listen: tuple[str, int] | None = None
    shutdown_timeout: float = setting(30.0, "Limits", "Seconds for running requests of a replica that is replaced.")
    hidden: ClassVar = frozenset({"pad_stream", "log_prompts", "memory"})

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """`serve run` gives text."""
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, dict) and value.get("method") != "auto":
            from outrider.drafters.config import SpeculativeConfig

            SpeculativeConfig.of(value)  # what is wrong is said here, and not in a replica
        return value

    @model_validator(mode="after")
    def _consistent(self) -> DeployOptions:
        if self.replicas is not None and (self.min_replicas or self.max_replicas):
            raise ValueError("replicas is a fixed number; give it, or min_replicas and max_replicas")
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError("min_replicas and max_replicas go together")
        if self.min_replicas and self.max_replicas and self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}")
        if self.pad_stream is not None:
            raise ValueError(
                "pad_stream cannot be promised behind a proxy, which sends events when it likes; use `outrider serve`"
            )
        return self

    @property
    def fewest(self) -> int:
        """Replicas at the start."""
        return self.replicas or self.min_replicas or 1

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """See `ServeOptions.hosts`. Where Ray's proxies listen, the address is not known here."""
        return answered_hosts(self.host if self.listen else "", self.api_key, self.allowed_host)

    def of_replica(self) -> ServeOptions:
        """The options of one replica. Those of the address, the keys and the origins are the front's."""
        names = set(ServeOptions.model_fields) - _under("Server") - {"cors_origin"}
        return ServeOptions(**self.model_dump(include=names))

    def of_front(self) -> DeployOptions:
        """The options of the front alone. Its port is that of `listen`, or of Ray's proxies."""
        engine = _under("Model", "Engine", "Replicas") | {"speculative_config", "port"}
        return DeployOptions(**self.model_dump(exclude=engine - {"served_model_name", "fronts", "patience"}))

    @property
    def front_name(self) -> str:
        """The name of the front's deployment. It changes when the front has to be replaced."""
        return "front-" + hashlib.sha256(self.of_front().model_dump_json().encode()).hexdigest()[:8]


def _under(*panels: str) -> set[str]:
    """The options under these headings of the help page."""
    return {name for name, field in shown(DeployOptions).items() if panel(field) in panels}


def serve_config(options: DeployOptions, name: str) -> str:
    """The configuration file of `serve run` and `serve deploy`, as YAML. API keys are left out: they do not belong into git."""
    import yaml

    args = options.model_dump(mode="json", exclude_defaults=True, exclude={"api_key", "host", "port"})
    args["engines"] = options.engines
    config: dict[str, Any] = {
        "http_options": {"host": options.host, "port": options.port},
        "applications": [
            {
                "name": options.engines,
                "route_prefix": None,
                "import_path": "outrider_ray:build_engines",
                "args": args,
            },
            # a copy, or YAML would refer to the first by an anchor
            {
                "name": name,
                "route_prefix": "/",
                "import_path": "outrider_ray:build_front",
                "args": deepcopy(args),
            },
        ],
    }
    return _HEAD + yaml.safe_dump(config, sort_keys=False)
