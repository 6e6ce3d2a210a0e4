"""`ray` is the library. pytest names these tests after their folder, and puts an empty module of that name in its place."""

import sys

if getattr(sys.modules.get("ray"), "__file__", None) is None:
    for name in ("ray", "ray.tests"):
        sys.modules.pop(name, None)
