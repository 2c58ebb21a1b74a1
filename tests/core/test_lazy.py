"""Names that are loaded when they are first asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from windlass.core.lazy import loader_of, reverse


def test_a_table_of_homes_becomes_a_table_of_names() -> None:
    assert reverse({"a": ("x", "y"), "b": ("z",)}) == {"x": "a", "y": "a", "z": "b"}


def test_a_name_is_loaded_from_its_home_or_the_reason_is_given() -> None:
    load = loader_of(__name__, {"OrderedDict": "collections"}, {"dummy": "it is not built"})
    from collections import OrderedDict

    assert load("OrderedDict") is OrderedDict
    assert vars(sys.modules[__name__])["OrderedDict"] is OrderedDict, "the next access finds it"
    with pytest.raises(ImportError, match="has no dummy: it is not built"):
        load("dummy")
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        load("other")


def test_a_module_of_names_costs_no_torch_before_one_is_used() -> None:
    code = (
        "import sys, windlass.utils.dataclasses as names\n"
        "assert names.ProjectConfiguration('p').project_dir == 'p'\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_torch_is_imported_without_collections_by_any_module() -> None:
    code = (
        "import gc, importlib.util, sys\n"
        "from windlass.core.lazy import import_torch_uncollected\n"
        "import_torch_uncollected()\n"
        "import_torch_uncollected()  # as in a launched command\n"
        "assert importlib.util.find_spec('torch') is not None, 'asked for before it is imported'\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append(info))\n"
        "import torch\n"
        "print(len(seen), gc.isenabled(), gc.get_freeze_count() > 100_000, torch.ones(1).item())\n"
        "import_torch_uncollected()\n"
        "print(sum(type(finder).__module__ == 'windlass.core.lazy' for finder in sys.meta_path))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found, enabled, frozen, one, finders = said.split()
    assert int(found) < 5, "a few before and after it"
    assert (enabled, frozen, one, finders) == ("True", "True", "1.0", "1")
