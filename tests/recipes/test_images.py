from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")

from PIL import Image

from windlass.core.errors import DataError
from windlass.recipes.images import load_images
from windlass.recipes.recipe import load_recipe
from windlass.recipes.schema import Recipe

RECIPE = """\
task: image-classification
data: {{format: folder, train: {train}, image_size: 4, eval_fraction: 0.25}}
model: {{config: {{model_type: vit}}}}
"""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four white and four black images, of different sizes."""
    for name, colour in (("white", 255), ("black", 0)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(4):
            Image.new("L", (4 + index, 8), colour).save(tmp_path / "photos" / name / f"{index}.png")
    return tmp_path / "photos"


def recipe(tmp_path: Path, photos: Path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(train=photos))
    return load_recipe(path, overrides)


def test_a_folder_of_each_class(tmp_path: Path, photos: Path) -> None:
    train, held, names = load_images(recipe(tmp_path, photos).data, seed=1)
    assert names == ["black", "white"]
    assert held is not None
    assert (len(train), len(held)) == (6, 2)
    assert train.shape == (3, 4, 4)
    for row in (*(train[i] for i in range(6)), held[0], held[1]):
        assert torch.equal(row["pixel_values"], torch.full((3, 4, 4), 2.0 * row["labels"] - 1))


def test_hidden_folders_and_files_are_not_of_the_data(tmp_path: Path, photos: Path) -> None:
    shutil.copytree(photos / "white", photos / ".ipynb_checkpoints")
    (photos / "white/._0.png").write_bytes(b"of another program")
    train, held, names = load_images(recipe(tmp_path, photos).data, seed=1)
    assert held is not None
    assert (names, len(train) + len(held)) == (["black", "white"], 8)


def test_few_images_are_of_each_class(tmp_path: Path, photos: Path) -> None:
    train, held, names = load_images(recipe(tmp_path, photos, "data.max_samples=4").data, seed=1)
    assert (names, len(train)) == (["black", "white"], 3)
    assert held is not None
    labels = sorted(row["labels"] for row in (train[0], train[1], train[2], held[0]))
    assert labels == [0, 0, 1, 1]


def test_one_class_is_refused(tmp_path: Path, photos: Path) -> None:
    shutil.rmtree(photos / "white")
    with pytest.raises(DataError, match=r"photos: has images of one class only \(black\); two are needed"):
        load_images(recipe(tmp_path, photos).data, seed=1)


def test_images_of_several_sizes_need_one_to_be_scaled_to(tmp_path: Path, photos: Path) -> None:
    with pytest.raises(DataError, match=r"\.png is \d x 8 pixels, and .*\.png \d x 8: .*data\.image_size"):
        load_images(recipe(tmp_path, photos, "data.image_size=null").data, seed=1)


def test_an_unreadable_image_is_named(tmp_path: Path, photos: Path) -> None:
    for file in photos.glob("*/*.png"):
        file.write_text("not an image")
    train, _, _ = load_images(recipe(tmp_path, photos).data, seed=1)
    with pytest.raises(DataError, match=r"\.png. does not open"):
        train[0]


def test_a_class_without_training_images(tmp_path: Path, photos: Path) -> None:
    (tmp_path / "held" / "grey").mkdir(parents=True)
    Image.new("L", (4, 4), 99).save(tmp_path / "held" / "grey" / "0.png")
    with pytest.raises(DataError, match="class 'grey' never occurs in the training data"):
        load_images(recipe(tmp_path, photos, f"data.eval={tmp_path}/held").data, seed=1)


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no images"):
        load_images(recipe(tmp_path, tmp_path / "empty").data, seed=1)
