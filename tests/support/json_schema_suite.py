"""The JSON Schema Test Suite, draft 2020-12, from the source of jsonschema: `python tests/support/json_schema_suite.py FOLDER`.

The package index has it under this hash for good. The suite is MIT licensed (Julian Berman), and is not kept in the repository.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "4.25.1"
SHA256 = "e4a9655ce0da0c0b67a085847e00a3a51449e1157f4f75e9fb5aa545e122eb85"
TESTS = f"jsonschema-{VERSION}/json/tests/draft2020-12/"


class Case(NamedTuple):
    """name: file, group and test. valid: whether the document fits the schema."""

    name: str
    schema: Any
    document: Any
    valid: bool


def fetch(folder: Path) -> Path:
    """The package, fetched once. Raises OSError or SubprocessError if it cannot be fetched, ValueError for another file."""
    package = folder / f"jsonschema-{VERSION}.tar.gz"
    if not package.is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jsonschema"]
        subprocess.run([*command, f"jsonschema=={VERSION}", "-d", folder], check=True, capture_output=True, timeout=600)
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{package} has the sha256 {found}, not {SHA256}; delete it")
    return package


def cases(package: Path) -> Iterator[Case]:
    """Each test of the draft; optional ones and those of formats are not among them."""
    with tarfile.open(package) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            name = member.name.removeprefix(TESTS)
            if not member.name.startswith(TESTS) or "/" in name or not name.endswith(".json"):
                continue
            file = tar.extractfile(member)
            assert file is not None
            for group in json.load(file):
                for test in group["tests"]:
                    where = f"{name}: {group['description']}: {test['description']}"
                    yield Case(where, group["schema"], test["data"], test["valid"])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    print(f"{len(list(cases(fetch(target))))} cases in {target}")
