"""Old names of the public API import for one release, and warn where they are used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from outrider._deprecated import MODULES, NAMES

# old module -> a name of it, where its new module has one that docs or README showed
SHOWN = {
    "outrider.drafters.documents": "read_corpus",
    "outrider.drafters.translated": "TranslatedDrafter",
    "outrider.drafters.vocabulary": "Vocabulary",
    "outrider.models.toy": "ToyModel",
    "outrider.noise": "Noise",
    "outrider.tree": "ancestor_mask",
    "outrider.types": "Draft",
}


def fresh(old: str) -> object:
    """Import an old module as if for the first time. Its parents stay."""
    sys.modules.pop(old, None)
    return importlib.import_module(old)


@pytest.mark.parametrize("old", MODULES)
def test_an_old_module_is_the_new_one(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} has moved: use {MODULES[old]}"):
        module = fresh(old)
    new = importlib.import_module(MODULES[old])
    names = [name for name in vars(new) if not name.startswith("_")]
    assert names or old == "outrider.measure"
    assert all(getattr(module, name) is getattr(new, name) for name in names)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("old", "name"), SHOWN.items())
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_docs_showed(old: str, name: str) -> None:
    assert getattr(fresh(old), name).__name__ in (name, NAMES.get(MODULES[old], {}).get(name))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("module", "old", "new"), [(m, a, b) for m, names in NAMES.items() for a, b in names.items()])
def test_an_old_name_is_the_new_one(module: str, old: str, new: str) -> None:
    home, _, name = new.rpartition(":")
    found = getattr(importlib.import_module(home or module), name)
    aliases = [alias for alias, target in MODULES.items() if target == module]
    direct = module in (
        "outrider.decode",
        "outrider.drafters",
        "outrider.drafters.base",
        "outrider.models.hf",
        "outrider.verify",
    )
    assert aliases or direct
    for alias in aliases:
        assert getattr(fresh(alias), old) is found
    if direct:
        with pytest.warns(DeprecationWarning, match=f"{module}.{old} has moved") as said:
            assert getattr(importlib.import_module(module), old) is found
        assert {w.filename for w in said} == {__file__}
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = importlib.import_module(module).no_such_name


def test_the_warning_names_the_line_of_the_user() -> None:
    code = "import warnings; warnings.simplefilter('always')\nimport outrider\nfrom outrider.types import Draft, Kept\n"
    code += "from outrider.core.types import Commit\nassert Kept is Commit"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = [line for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert line.startswith("<string>:3: DeprecationWarning: outrider.types has moved: use outrider.core.types")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_custom_generate_is_a_function_under_both_names() -> None:
    import outrider
    from outrider.integrations import transformers as new

    assert outrider.custom_generate is not None
    fresh("outrider.custom_generate")
    from outrider.custom_generate import CustomGenerate  # pyright: ignore[reportMissingImports]

    assert CustomGenerate is new.CustomGenerate
    assert isinstance(outrider.custom_generate({"method": "suffix"}), CustomGenerate)
    vars(outrider).pop("custom_generate")
    assert outrider.custom_generate is new.custom_generate


def test_new_names_do_not_warn() -> None:
    code = "import outrider.drafters, outrider.verify, outrider.core.types; outrider.drafters.DraftContext"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert "has moved" not in done.stderr
    with pytest.raises(ModuleNotFoundError, match=r"outrider\.typos"):
        importlib.import_module("outrider.typos")
