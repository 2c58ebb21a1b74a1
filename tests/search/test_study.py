from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.core.errors import ConfigError, DataError
from windlass.search.study import FILE_NAME, Record, Study


def study_of(folder: Path, *values: list[float], directions: tuple[str, ...] = ("minimize",)) -> Study:
    study = Study(folder, directions, "random", {})
    study.trials = [
        Record(number, f"run-{number}", {"lr": 0.1}, "complete" if one else "failed", one)
        for number, one in enumerate(values)
    ]
    study.save()
    return study


def test_the_file_has_everything(tmp_path: Path) -> None:
    written = study_of(tmp_path, [0.5], [], [0.25])
    written.trials[0].reports = {4: 0.75}
    written.save()
    assert Study(tmp_path, ("minimize",), "random", {}).trials == written.trials


def test_the_best(tmp_path: Path) -> None:
    assert [one.number for one in study_of(tmp_path / "a", [0.5], [], [0.25]).best()] == [2]
    assert [
        one.number for one in study_of(tmp_path / "b", [0.5], [0.7], directions=("maximize",)).best()
    ] == [1]
    both = ("minimize", "maximize")
    several = study_of(tmp_path / "c", [1.0, 1.0], [2.0, 1.0], [2.0, 3.0], [1.0, 1.0], directions=both)
    assert [one.number for one in several.best()] == [0, 2, 3]


def test_another_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    study_of(tmp_path, [1.0])
    with pytest.raises(
        ConfigError, match=r"is another search, with backend='random', direction=\['minimize'\]"
    ):
        Study(tmp_path, ("maximize",), "random", {})
    with pytest.raises(ConfigError, match="another search"):
        Study(tmp_path, ("minimize",), "grid", {})


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"trials": 3}', "NAN", "LINK"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    study_of(tmp_path, [1.0])
    path = tmp_path / FILE_NAME
    if damage == "LINK":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "NAN":
        content = json.loads(path.read_text())
        content["trials"][0]["values"] = [float("nan")]
        path.write_text(json.dumps(content))
    else:
        path.write_text(damage)
    with pytest.raises(DataError, match=FILE_NAME):
        Study(tmp_path, ("minimize",), "random", {})
