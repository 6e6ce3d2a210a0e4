"""A page: one HTML file with its style, its script and its data. It needs no network and no other file.

The chat page of a server is the exception: its script is a file of its own.

The script is made of the ES modules in a folder, in the order in which they need each other. A content security policy allows
this script and this style by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"

# Every page has this head and this end.
FRAME = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<!-- policy -->
<meta name="viewport" content="width=device-width, initial-scale=1">
<!-- title -->
<link rel="icon" href="data:,">
<!-- style -->
</head>
<body>
<!-- body -->
<!-- data -->
<!-- script -->
</body>
</html>
"""

_IMPORT = re.compile(r"""^import \{([^}]*)\} from "\./([\w-]+\.js)";\n""", re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|class) (\w+)", re.M)
_LIST = re.compile(r"export\{([^}]*)\};?\s*$")  # the end of a library's file


def assemble(html: Path, css: Path, script: Path, data: str = "", connect: bool = False, apart: str = "") -> str:
    """One page from its parts. data: JSON for the element `data`. connect: the page may ask its own server.

    html: the line of the title, then the body. base.css stands before the style. apart: the name under which the server has the
    script (`bundle`). A browser then paints the page before it has read the script.
    """
    style = (ASSETS / "base.css").read_text(encoding="utf-8") + css.read_text(encoding="utf-8")
    code = bundle(script)
    allowed = [
        "default-src 'none'",
        "script-src 'self'" if apart else f"script-src '{_hash(code)}'",
        f"style-src '{_hash(style)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if connect else []),
    ]
    # A data block is not a script. No `<` can end it early.
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(allowed)}">',
        "style": f"<style>{style}</style>",
        "data": f'<script type="application/json" id="data">{safe}</script>' if data else "",
        "script": f'<script type="module" src="{apart}"></script>'
        if apart
        else f'<script type="module">{code}</script>',
    }
    parts["title"], _, body = html.read_text(encoding="utf-8").partition("\n")
    parts["body"] = body.rstrip("\n")
    return re.sub(r"<!-- (\w+) -->", lambda found: parts[found[1]], FRAME)


def bundle(script: Path) -> str:
    """One module from a module and those that it imports. Each keeps its names to itself.

    Only `import {a, b} from "./file.js";`, `export` before function, const or class, and a list of exports at the end are known.
    No module may import one that needs it. Raises ValueError for other forms.
    """
    done = dict[str, str]()
    folders = [script.parent, ASSETS]

    def visit(name: str) -> None:
        if name in done:
            return
        source = next(folder / name for folder in folders if (folder / name).exists()).read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(source):
            visit(other)
        exports = _EXPORT.findall(source)
        body = _IMPORT.sub(lambda m: f"const {{{m[1]}}} = {_variable(m[2])};\n", source)
        body = re.sub(r"^export ", "", body, flags=re.M)
        if listed := _LIST.search(body):
            body = body[: listed.start()] + "\n"
            exports += [re.sub(r"(\w+) as (\w+)", r"\2: \1", one.strip()) for one in listed[1].split(",")]
        if re.search(r"^(import|export)\b", body, re.M):
            raise ValueError(f"{name} has an import or export of a form that `bundle` does not know")
        done[name] = f"const {_variable(name)} = (() => {{\n{body}return {{ {', '.join(exports)} }};\n}})();\n"

    visit(script.name)
    code = "".join(done.values())
    if "</script" in code.lower():
        raise ValueError(f"{script.name} or a module of it holds </script, which would end it")
    return code


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
