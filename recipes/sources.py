"""Which text the pair learns from, by name and version, and which of it nobody may train on.

Everything is permissively licensed (MIT, BSD, Apache-2.0, PSF) and comes from a package index as wheels, so the recipe
needs no dataset hub. Held out means a whole package: files of one package quote each other, and a random split by file
would measure memory.
"""

from __future__ import annotations

_TRAIN = """
aiohttp==3.14.5 algorithms==1.0.1 anyio==4.16.0 attrs==26.1.0 black==26.10.1 boltons==26.2.0 bottle==0.13.4
celery==5.7.0 click==8.5.1 coverage==7.17.3 dask==2026.8.0 distlib==0.4.4 django==6.1.3 fabric==3.2.3 fastapi==0.165.0
flake8==7.5.0 funcy==2.1 gunicorn==27.0.1 hatchling==1.33.0 invoke==3.0.3 ipython==9.18.1 isort==9.0.2 jedi==0.20.1
jinja2==3.1.6 jsonschema==4.26.0 luigi==3.8.1 matplotlib==3.11.2 mpmath==1.4.1 mypy==2.4.1 nbformat==5.11.1
networkx==3.7 nltk==3.10.4 numpy==2.5.5 pandas==3.1.1 parso==0.8.7 peewee==4.5.3 pip==26.3 poetry-core==2.5.0
pydantic==2.14.3 pyrsistent==0.20.0 pytest==9.2.0 requests==2.34.2 rich==15.0.0 scikit-image==0.26.0
scikit-learn==1.9.1 scipy==1.18.1 scrapy==2.19.0 setuptools==84.2.1 sphinx==9.1.1 sqlalchemy==2.1.9 starlette==1.10.0
statsmodels==0.15.0 sympy==1.14.0 textual==8.2.8 toolz==1.2.0 tornado==6.6.1 tox==4.67.13 traitlets==5.16.1
trio==0.35.0 twisted==26.10.0 typer==0.29.2 urllib3==2.8.0 werkzeug==3.1.9 xarray==2026.9.0
"""
TRAIN = tuple(_TRAIN.split())

HELD_OUT = ("flask==3.1.3", "httpx==0.28.1", "marshmallow==4.4.0", "more-itertools==11.2.1", "sortedcontainers==2.4.0")

# Of the standard library, the modules that are held out: by their path below the library's folder.
HELD_OUT_STDLIB = ("argparse.py", "fractions.py", "heapq.py", "json/", "shelve.py", "statistics.py", "textwrap.py")

# Tables, other people's copies, and a second Python's worth of tests: nothing to learn from, or already counted.
SKIPPED_FOLDERS = frozenset(
    (
        *("_vendor", "vendored", "vendor", "_vendored", "extern", "externals", "typeshed"),
        *("encodings", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "idlelib", "turtledemo"),
        *("locale", "migrations", "array_api_compat", "array_api_extra"),
    )
)
