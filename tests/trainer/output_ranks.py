"""Run on ranks: the output folder can't be made; every rank says so."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.nonfinite_cases import Weights, trainer_for

from windlass import ConfigError


def main(folder: Path) -> str:
    said = ""
    (folder / "a file").touch()
    trainer = trainer_for(folder / "a file" / "out", None, Weights())
    try:
        trainer.train()
    except ConfigError as error:
        said = str(error)
    trainer.end()
    return said
