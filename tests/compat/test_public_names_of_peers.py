"""What scripts import from transformers' trainer modules or from accelerate exists here, or is refused with a reason.

The names are read from the packages as they are installed; the reasons are in `windlass.compat.refused_names`.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", minversion="1.10")

from tests.compat import peers
from tests.docs import refused_names
from tests.docs.refused_names import MEMBERS, filled_in
from tests.versions import with_pinned

from windlass import Accelerator, Trainer
from windlass.compat.refused_names import WHY, WHY_NOT_COMMANDS

MODULES = list(peers.modules())
CLASSES = list(peers.classes())


def _reasons(own: str) -> dict[str, str]:
    return WHY_NOT_COMMANDS if own == "windlass.commands" else WHY


def _resolves(own: str, name: str) -> bool:
    module = importlib.import_module(own)
    try:
        getattr(module, name)
    except AttributeError:
        return False
    except ImportError as error:
        if str(error) != f"{own} has no {name}: {_reasons(own).get(name)}":
            raise  # the name's home is broken
        return False
    return True


@pytest.mark.parametrize(("peer", "own"), MODULES, ids=[peer for peer, _ in MODULES])
@with_pinned("transformers")
def test_every_name_of_a_module_resolves_or_says_why_not(peer: str, own: str) -> None:
    names = peers.names_of(peer)
    assert names, f"nothing found in {peer}"
    lost = [name for name in names if not _resolves(own, name) and name not in _reasons(own)]
    assert not lost, f"{own} lacks names of {peer} and has no reasons for them: {lost}"


@pytest.mark.parametrize("own", sorted({own for _, own in MODULES}))
def test_nothing_is_refused_that_has_a_home(own: str) -> None:
    """A refusal comes first: it would hide the name."""
    offered = getattr(importlib.import_module(own), "__all__", ())
    assert not set(offered) & _reasons(own).keys()


@with_pinned("transformers")
def test_no_reason_is_stale() -> None:
    everywhere = {(own, name) for peer, own in MODULES for name in peers.names_of(peer)}
    resolving = [
        f"{own}.{name}" for own, name in everywhere if name in _reasons(own) and _resolves(own, name)
    ]
    assert not resolving, f"refused and yet there: {resolving}"
    known = {name for _, name in everywhere}
    unknown = sorted((WHY.keys() | WHY_NOT_COMMANDS.keys()) - known)
    assert not unknown, f"refused, and no module of the installed packages has them: {unknown}"


@pytest.mark.parametrize(
    ("peer", "cls", "own", "name"), CLASSES, ids=[f"{peer}.{name}" for peer, _, _, name in CLASSES]
)
@with_pinned("transformers")
def test_every_member_of_a_class_exists_or_says_why_not(peer: str, cls: type, own: str, name: str) -> None:
    if name in WHY:
        return  # the class itself is refused
    mine = getattr(importlib.import_module(own), name)
    if getattr(mine, "reason", None):
        return  # it cannot be made
    theirs, refused = peers.members_of(cls), _refused(cls.__name__)
    inherited = {member for base in cls.__mro__[1:] for member in _refused(base.__name__)}
    lost = sorted(member for member in theirs - refused - inherited if not _has(mine, member))
    assert not lost, f"{own}.{name} lacks members of {peer}.{name}: {lost}"
    assert not {member for member in refused if _has(mine, member)}, "refused and yet there"


def _refused(owner: str) -> set[str]:
    return {member for members in MEMBERS.get(owner, {}).values() for member in members}


def _has(cls: type, name: str) -> bool:
    if peers.has_member(cls, name):
        return True
    if cls.__name__ == "HfDeepSpeedConfig":  # makes one of transformers
        return hasattr(cls({"zero_optimization": {"stage": 1}}), name)
    if cls.__name__ not in ("GradientState", "AcceleratorState"):
        return False
    Accelerator(cpu=True)  # both answer for the loop that there is
    return hasattr(cls(), name)


def test_the_classes_that_scripts_subclass_are_among_those_compared() -> None:
    names = {name for _, _, _, name in CLASSES}
    assert {"Trainer", "TrainingArguments", "TrainerCallback", "Accelerator", "WandbCallback"} <= names


def test_attributes_that_a_constructor_sets_are_members() -> None:
    (trainer,) = [cls for _, cls, _, name in CLASSES if name == "Trainer"]
    assert {"args", "is_model_parallel", "create_optimizer"} <= peers.members_of(trainer)
    assert peers.has_member(Trainer, "is_in_train")
    assert not peers.has_member(Trainer, "no_such_name")


def test_no_reason_for_a_member_is_stale() -> None:
    known: dict[str, set[str]] = {}
    for _, cls, _, _ in CLASSES:  # several classes may have one name
        known.setdefault(cls.__name__, set()).update(peers.members_of(cls))
    assert MEMBERS.keys() <= known.keys()
    stale = {owner: _refused(owner) - known[owner] for owner in MEMBERS}
    assert not any(stale.values()), f"refused, and the installed packages have no such members: {stale}"


def test_the_page_is_what_the_code_says(root: Path) -> None:
    page = (root / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert page == filled_in(page), "run: python -m tests.docs.refused_names docs/compatibility.md"
    members = [f"{owner}.{n}" for owner, table in MEMBERS.items() for names in table.values() for n in names]
    assert not [name for name in (*WHY, *WHY_NOT_COMMANDS, *members) if f"`{name}`" not in page]
    for mark in refused_names.tables():
        assert len(re.findall(f"<!-- (?:begin|end): {mark} -->", page)) == 2


def test_the_command_fills_in_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin: refused commands -->\nold\n<!-- end: refused commands -->\nb\n", "utf-8")
    refused_names.main(str(page))
    lines = page.read_text("utf-8").splitlines()
    assert lines[:2] == ["a", "<!-- begin: refused commands -->"]
    assert lines[-2:] == ["<!-- end: refused commands -->", "b"]
    assert "old" not in lines
    assert any("`tpu`" in line for line in lines)


@pytest.mark.parametrize(
    "statement",
    [
        "from windlass.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint",
        "from windlass.trainer_callback import TrainerCallback, TrainerState",
        "from windlass.training_args import TrainingArguments, str_to_bool",
        "import windlass.trainer, windlass.data, windlass.callbacks, windlass.integrations, windlass.trainer_pt_utils",
    ],
)
def test_names_are_loaded_when_they_are_asked_for(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert not {{'transformers', 'accelerate'}} & set(sys.modules)"
    if "str_to_bool" not in statement:
        code += "\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    trainer_utils = importlib.import_module("windlass.trainer_utils")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        trainer_utils.no_such_name  # noqa: B018


def test_a_refused_name_says_what_to_use_instead() -> None:
    with pytest.raises(
        ImportError,
        match=r"JITCheckpointCallback: every run saves and leaves on the signals that preemption_signals",
    ):
        from windlass.trainer_jit_checkpoint import JITCheckpointCallback  # noqa: F401
