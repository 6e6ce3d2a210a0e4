"""What `outrider deploy`, `serve run` and a YAML file say about replicas."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from pydantic import Field, field_validator, model_validator

from outrider.config import SpeculativeConfig
from outrider.serve.assembly import ServerOptions


class DeployOptions(ServerOptions):
    """The options of a server, and how many of it there are.

    replicas: a fixed number. min_replicas, max_replicas: the number follows the load. target_requests: requests of a
    replica, those that wait included, that the number of replicas aims at; None for max_num_seqs, so that nobody waits.
    upscale_delay, downscale_delay: seconds that a load must last. cpus, gpus: of one replica. fronts: replicas of the front.
    prefix_weight: see `outrider.ray.prefixes.ranked`.
    patience: seconds that a request waits for a replica that lives. engines: the Serve application of the replicas.
    listen: host and port where the fronts listen themselves; None for Ray's proxies.
    """

    replicas: int | None = Field(None, ge=1)
    min_replicas: int | None = Field(None, ge=1)
    max_replicas: int | None = Field(None, ge=1)
    target_requests: float | None = Field(None, gt=0)
    upscale_delay: float = Field(10.0, ge=0)
    downscale_delay: float = Field(300.0, ge=0)
    cpus: float = Field(1.0, gt=0)
    gpus: float = Field(0.0, ge=0)
    fronts: int = Field(1, ge=1)
    prefix_weight: float = Field(4.0, ge=0)
    patience: float = Field(60.0, gt=0)
    engines: str = "outrider-engines"
    listen: tuple[str, int] | None = None

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        """`serve run` gives text."""
        given = json.loads(given) if isinstance(given, str) else given
        if isinstance(given, dict) and given.get("method") != "auto":
            SpeculativeConfig.of(given)  # what is wrong is said here, and not in a replica
        return given

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
        self.settings()
        return self

    @property
    def fewest(self) -> int:
        """Replicas at the start."""
        return self.replicas or self.min_replicas or 1

    def server(self) -> dict[str, Any]:
        """The options of one replica. Those of the address, the keys and the origins are the front's."""
        front = {"host", "api_key", "cors_origin", "allowed_host", "ssl_certfile", "ssl_keyfile"}
        return self.model_dump(mode="json", include=set(ServerOptions.model_fields) - front)

    @property
    def front_name(self) -> str:
        """The name of the front's deployment. It changes when the front has to be replaced."""
        parts = json.dumps(
            [asdict(self.settings()), self.patience, self.fronts, self.engines, self.listen], sort_keys=True
        )
        return "front-" + hashlib.sha256(parts.encode()).hexdigest()[:8]
