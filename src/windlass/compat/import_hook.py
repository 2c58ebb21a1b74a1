"""Answer imports of transformers' trainer and of accelerate by Windlass, for scripts that are run as they are.

`windlass run SCRIPT` starts Python with `startup/` on its path, where Python itself looks for code to run before any
script; data workers and launched ranks start the same way. That code calls `install`. Afterwards the modules below are
two in one: a script, or a library that trains for it, gets the name of Windlass if it has one, else that of the library
itself; the libraries' own modules get what they always get. Nothing is written to where packages are installed.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from windlass.compat.refused_names import WHY

VARIABLE = "WINDLASS_COMPAT"
STARTUP = Path(__file__).with_name("startup")

# Modules inside packages of the libraries; the package's module of Windlass has their names.
_INSIDE = {
    "transformers.integrations": ("integration_utils",),
    "accelerate.utils": (
        "ao", "bnb", "constants", "dataclasses", "deepspeed", "environment", "fsdp_utils", "imports", "launch",
        "megatron_lm", "memory", "modeling", "offload", "operations", "other", "random", "tqdm", "versions",
    ),
}  # fmt: skip
# Modules of the libraries, and the module of Windlass that has the same names.
MODULES = {
    "transformers.trainer": "windlass.trainer",
    **{
        f"transformers.{name}": f"windlass.{name}"
        for name in (
            "trainer_utils", "trainer_callback", "trainer_pt_utils", "training_args", "optimization",
            "trainer_seq2seq", "training_args_seq2seq", "debug_utils", "hf_argparser",
            "utils.notebook",
        )
    },
    "transformers.integrations.deepspeed": "windlass.zero.building",
    "accelerate": "windlass",
    "accelerate.accelerator": "windlass",
    **{
        f"accelerate.{name}": f"windlass.{name}"
        for name in (
            "big_modeling", "data_loader", "hooks", "launchers", "local_sgd", "logging", "optimizer",
            "parallelism_config", "scheduler", "state", "tracking", "utils",
        )
    },
    **{
        f"{package}.{name}": f"windlass.{package.partition('.')[2]}"
        for package, names in _INSIDE.items()
        for name in names
    },
}  # fmt: skip
# Where libraries replace what decides when runs log, evaluate and save.
_READ_BY_RUNS = ("transformers.trainer", "DEFAULT_CALLBACKS")
# Packages that look names up in the modules that define them.
_LAZY = ("transformers", "transformers.integrations")
# Slow to import, and no other module of the library imports them.
_SLOW = ("transformers.trainer", "transformers.trainer_seq2seq")
# What asks a module for `__path__` and other names while it is being imported.
_MACHINERY = ("importlib._bootstrap", "importlib._bootstrap_external")
# Libraries whose own modules use each other's names, or a model's hooks: they get the real ones.
_REAL = frozenset({"transformers", "accelerate", "peft", "diffusers", "importlib", "windlass"})


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make a new Python process answer imports, given those of this one."""
    paths = [str(STARTUP), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {VARIABLE: "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def install() -> None:
    """Answer imports from now on. Modules that were imported before stay as they are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        answers = Answers()
        # Before Python's own finder, which would find the library's module.
        sys.meta_path.insert(0, _Finder(answers))
        atexit.register(answers.report)


class Answers:
    """Chooses between Windlass and a library, and keeps what was chosen, for one line at the end."""

    def __init__(self) -> None:
        self._mapped: dict[str, None] = {}
        self._left: dict[str, None] = {}
        self._assigned: dict[str, None] = {}

    def find(self, module: str, name: str, caller: FrameType) -> Any:
        """The object that Windlass has for `name` of `module`; None if the caller gets the library's own. Raises
        ImportError if a script asks for a name that Windlass knows and does not support.
        """
        asking = str(caller.f_globals.get("__name__", ""))
        if name.startswith("__") or module not in MODULES or asking.partition(".")[0] in _REAL:
            return None
        try:
            found = getattr(importlib.import_module(MODULES[module]), name)
        except AttributeError:
            self._left[f"{module}.{name}"] = None
            return None
        except ImportError:
            # A name that is refused. A library asks for many that it never uses: it goes on with its own.
            if _is_script(caller):
                raise
            self._left[f"{module}.{name}"] = None
            return None
        self._mapped[f"{module.partition('.')[0]}.{name}"] = None
        return found

    def take(self, module: str, name: str, value: Any) -> None:
        """Note that a script or a library assigned a name of `module`, and pass it on if runs read it."""
        if (module, name) == _READ_BY_RUNS:
            setattr(importlib.import_module(MODULES[module]), name, value)
        else:
            self._assigned[f"{module}.{name}"] = None

    def report(self) -> None:
        """Print what was answered, on the main process of a job."""
        if not self._mapped or os.environ.get("RANK", "0") != "0" or _is_worker():
            return
        left = f"; left to the libraries: {', '.join(self._left)}" if self._left else ""
        if self._assigned:
            left += f"; assigned, and not read by runs: {', '.join(self._assigned)}"
        print(f"windlass answered the imports of {', '.join(self._mapped)}{left}", file=sys.stderr)


class _Answered(ModuleType):
    """A module of a library, with the names of Windlass in front of its own."""

    def __init__(self, name: str, answers: Answers, real: ModuleSpec | None) -> None:
        super().__init__(name)
        self.__dict__.update(_answers=answers, _spec_of_library=real, _library=None)

    def __getattr__(self, name: str) -> Any:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") in _MACHINERY:
            raise AttributeError(name)  # asked while this module is being made
        if name == "__all__":
            return self._star()
        found = self._answers.find(self.__name__, name, caller)
        return getattr(self.library(), name) if found is None else found

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Python itself sets the submodules, and names that begin so.
        if not name.startswith("_") and not isinstance(value, ModuleType):
            self._answers.take(self.__name__, name, value)

    def _star(self) -> list[str]:
        """The names of `from module import *`, each of which Python then asks for. Without a list of a library's own it
        would take what is in the dict of this module: nothing. A name that is refused would end the import.
        """
        library = self.library()
        public = getattr(library, "__all__", [name for name in dir(library) if not name.startswith("_")])
        return [name for name in public if name not in WHY]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.library())})

    def library(self) -> ModuleType:
        """The library's own module, executed when it is first needed."""
        module, spec = self._library, self._spec_of_library
        if module is None:
            if spec is None or spec.loader is None:
                raise AttributeError(f"{self.__name__} is not installed, and Windlass has no such name")
            module = importlib.util.module_from_spec(spec)
            # Before it is executed, because its parts may ask for its names meanwhile.
            self.__dict__["_library"] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                # Half a module would answer the next time, without the reason.
                self.__dict__["_library"] = None
                raise
            self._uncover(module)
        return module  # type: ignore[no-any-return]

    def _uncover(self, library: ModuleType) -> None:
        """Remove the submodules that the library itself hides behind another object of their name: Python put them here
        as they were imported, and `from accelerate.utils import tqdm` means the function.
        """
        for name, value in list(vars(self).items()):
            if isinstance(value, ModuleType) and not isinstance(vars(library).get(name, value), ModuleType):
                delattr(self, name)


class _Finder(MetaPathFinder):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES and fullname != "transformers":
            return None
        real = PathFinder.find_spec(fullname, path)
        if fullname == "transformers":
            return None if real is None else _with_loader(real, _TransformersLoader(self._answers, real))
        loader = _AnsweringLoader(self._answers, real)
        return ModuleSpec(fullname, loader) if real is None else _with_loader(real, loader)


def _with_loader(spec: ModuleSpec, loader: Loader) -> ModuleSpec:
    changed = ModuleSpec(spec.name, loader, origin=spec.origin)
    changed.submodule_search_locations = spec.submodule_search_locations
    changed.has_location = spec.has_location
    return changed


class _AnsweringLoader(Loader):
    def __init__(self, answers: Answers, real: ModuleSpec | None) -> None:
        self._answers, self._real = answers, real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Answered(spec.name, self._answers, self._real)

    def exec_module(self, module: ModuleType) -> None:
        # Now, in the order of the library itself.
        if self._real is not None and module.__name__ not in _SLOW:
            assert isinstance(module, _Answered)
            module.library()


class _TransformersLoader(Loader):
    """Loads transformers itself, whose main module looks names up in the modules that define them."""

    def __init__(self, answers: Answers, real: ModuleSpec) -> None:
        self._answers, self._real = answers, real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._real.loader is not None
        self._real.loader.exec_module(module)
        # The class and not the module, which transformers makes again when it looks at its own parts.
        _answer_lookups(type(sys.modules["transformers"]), self._answers)


def _answer_lookups(lazy: type, answers: Answers) -> None:
    """Let modules of this class, transformers' own, ask `answers` first for the names that its submodules define."""
    plain: Any = lazy.__getattribute__

    def look_up(self: Any, name: str) -> Any:
        package = "" if name.startswith("_") else plain(self, "__name__")
        if package in _LAZY:
            home = plain(self, "_class_to_module").get(name)
            found = None if home is None else answers.find(f"{package}.{home}", name, sys._getframe(1))
            if found is not None:
                return found
        return plain(self, name)

    lazy.__getattribute__ = look_up  # type: ignore[method-assign, assignment]


def _is_script(caller: FrameType) -> bool:
    """Return True for a file of the user's, not of an installed package."""
    file = str(caller.f_globals.get("__file__", ""))
    return "site-packages" not in file and "dist-packages" not in file


def _is_worker() -> bool:
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None
