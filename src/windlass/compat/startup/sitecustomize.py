"""Run by Python before any script, in a process that `windlass run` started; see `windlass.compat.import_hook`."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_next() -> None:
    """Run the sitecustomize of this installation, which this one hides."""
    spec = PathFinder.find_spec(
        "sitecustomize", [path for path in sys.path if os.path.abspath(path) != _HERE]
    )
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    _run_next()
finally:
    # Whatever it raises, Python goes on with the script, which is to run on Windlass.
    if os.environ.get("WINDLASS_COMPAT"):
        from windlass.compat.import_hook import install
        from windlass.core.lazy import import_torch_uncollected
        from windlass.core.package_remarks import mute_import_remarks

        mute_import_remarks()
        import_torch_uncollected()
        install()
