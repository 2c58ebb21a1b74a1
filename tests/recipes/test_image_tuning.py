from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.dist.launch import end_of, run_script
from tests.finetuning.vision_families import LOADED, family, picture

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from windlass.recipes.digits import digit_questions


def test_every_image_of_a_digit_has_a_question_and_its_answer() -> None:
    rows = list(digit_questions())
    assert len(rows) == 1797
    said = [[message["content"] for message in row["messages"]] for row in rows[:6]]
    assert said == [
        ["Which digit is it?", "It is zero."],
        ["Is it even or odd?", "It is odd."],
        ["Which digits are they?", "They are two and one."],
        ["Which digit is it?", "It is three."],
        ["Is it even or odd?", "It is even."],
        ["Which digits are they?", "They are five and four."],
    ]
    assert [len(row["images"]) for row in rows[:3]] == [1, 1, 2]
    assert all(
        image.shape == (8, 8) and image.dtype == "uint8" for row in rows[:9] for image in row["images"]
    )


def test_the_recipe_runs_and_is_resumed(tmp_path: Path) -> None:
    words = (
        "windlass",
        "train",
        "sft-images",
        "--tiny",
        "training.save_total_limit=2",
        "training.disable_tqdm=true",
    )
    said = run_script(*words, cwd=tmp_path)
    run = tmp_path / "runs" / "sft-images-tiny"
    assert "Model       llava" in said
    assert {"processor_config.json", "chat_template.jinja"} <= {
        file.name for file in (run / "checkpoint-4").iterdir()
    }
    weights = run / "checkpoint-4" / "model.safetensors"
    whole = weights.read_bytes()
    shutil.rmtree(weights.parent)
    run_script(*words, "--resume", cwd=tmp_path)
    assert weights.read_bytes() == whole


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A model with its processor, and lines of questions on files of images beside them."""
    model, processor = family("idefics3")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    (tmp_path / "album").mkdir()
    lines = []
    for at in range(8):
        picture(at).save(tmp_path / "album" / f"{at}.png")
        lines.append({"image": f"{at}.png", "question": f"Is it {at}?", "answer": "Yes."})
    (tmp_path / "album" / "photos.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "mine.yaml").write_text(
        "task: sft\nmodel: {name: model}\ndata: {train: album/photos.jsonl, prompt_column: question, "
        "completion_column: answer, eval_fraction: 0.25}\ntraining: {max_steps: 2, max_length: 256, use_cpu: true, "
        "bf16: false, logging_steps: 1, eval_strategy: steps, eval_steps: 2, disable_tqdm: true, output_dir: run}\n"
    )
    return tmp_path


@LOADED
def test_a_named_model_is_tuned_on_files_of_images(photos: Path) -> None:
    run_script("windlass", "train", "mine.yaml", cwd=photos)
    rows = [json.loads(line) for line in (photos / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert any("eval_loss" in row for row in rows)


@LOADED
def test_faults_are_named_before_training(photos: Path) -> None:
    (photos / "album" / "3.png").write_text("no image")
    code, said = end_of("windlass", "train", "mine.yaml", cwd=photos)
    assert code
    assert "photos.jsonl:4: the image 'album/3.png' does not open" in said
    code, said = end_of("windlass", "data", "show", "mine.yaml", cwd=photos)
    assert code
    assert "rows with images are prepared by the run itself" in said
