"""Many replicas of the server behind one address, on Ray Serve. Needs the extra `ray`.

`outrider deploy` starts them; `serve run outrider_ray:build model=... replicas=2` does, too, and so does a YAML file with
`import_path: outrider_ray:build`.

`front` is HTTP without Ray: it resumes a stream whose replica died. `prefixes` says which replica has read a prompt.
`deployments` and `router` put both on Ray Serve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider_ray.deployments import build, build_engines, build_front

__all__ = ["build", "build_engines", "build_front"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    from outrider_ray import deployments

    return getattr(deployments, name)
