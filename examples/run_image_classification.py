"""Classify images: a folder of them, or by default the 1,797 digits of scikit-learn, which need no download.

    python examples/run_image_classification.py --do_train --do_eval --output_dir runs/digits
    python examples/run_image_classification.py --model_name_or_path google/vit-base-patch16-224-in21k \
        --train_dir photos/train --validation_dir photos/val --image_size 224 --do_train --do_eval \
        --output_dir runs/photos

A folder has one folder of images for each class. Without --model_name_or_path a small vision transformer is built from
a config. The images are scaled to the range from -1 to 1.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common import ModelArguments, build_model, parse, run
from transformers import AutoModelForImageClassification

from windlass import Trainer, TrainingArguments

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
DIGITS_HELD = 360


@dataclass
class ImageArguments:
    train_dir: str | None = field(
        default=None, metadata={"help": "Folder of training images; by default the digits."}
    )
    validation_dir: str | None = field(default=None, metadata={"help": "The same, for evaluation."})
    image_size: int = field(default=8, metadata={"help": "Width and height that images are scaled to."})
    patch_size: int = field(default=2, metadata={"help": "Width and height of a patch of a new model."})


def digits():
    """Training and evaluation samples of 8 x 8 grey images, and the names of the classes."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    rows = [{"pixel_values": p, "labels": int(label)} for p, label in zip(pixels, labels, strict=True)]
    return rows[:-DIGITS_HELD], rows[-DIGITS_HELD:], [str(digit) for digit in range(10)]


class Images(torch.utils.data.Dataset):
    """The images of a folder, which are read when they are needed."""

    def __init__(self, folder, names, size):
        self.files = [(file, names.index(file.parent.name)) for file in sorted(Path(folder).glob("*/*"))]
        self.size = size
        if not self.files:
            raise SystemExit(f"{folder} has no images in folders of their classes")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        from PIL import Image

        file, label = self.files[index]
        with Image.open(file) as image:
            scaled = image.convert("RGB").resize((self.size, self.size))
        pixels = torch.from_numpy(np.asarray(scaled, dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1
        return {"pixel_values": pixels, "labels": label}


def load(data):
    if data.train_dir is None:
        return digits()
    names = sorted(entry.name for entry in Path(data.train_dir).iterdir() if entry.is_dir())
    held = None if data.validation_dir is None else Images(data.validation_dir, names, data.image_size)
    return Images(data.train_dir, names, data.image_size), held, names


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main():
    model_args, data, args = parse(ModelArguments, ImageArguments, TrainingArguments)
    train, held, names = load(data)
    channels = train[0]["pixel_values"].shape[0]
    model = build_model(
        AutoModelForImageClassification, model_args, None, "vit", num_labels=len(names), image_size=data.image_size,
        patch_size=data.patch_size, num_channels=channels, id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)}, **SIZES,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=args, train_dataset=train, eval_dataset=held, compute_metrics=accuracy
    )
    metrics = run(trainer, args)
    if metrics and trainer.is_world_process_zero():
        print(f"accuracy {metrics['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
