"""Noise on the input embeddings (NEFTune)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.fused_cases import Tied
from tests.trainer.small import Net, arguments, llama, rows, text_rows, weights_hash
from torch import Tensor, nn

from windlass import Trainer, TrainerCallback, TrainingArguments
from windlass.core.errors import ConfigError
from windlass.transforms.neftune import input_embeddings, noisy_embeddings, sequence_lengths


class Shown(nn.Module):
    """Returns its embeddings."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, width)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return self.embed(input_ids)  # type: ignore[no-any-return]


def noise(model: Shown, alpha: float, ids: Tensor, **inputs: Tensor) -> Tensor:
    with noisy_embeddings(model, alpha):
        return (model(ids, **inputs) - model.embed.weight[ids]).detach()


def test_noise_is_uniform_with_the_scale_of_the_paper() -> None:
    torch.manual_seed(0)
    model, ids = Shown(), torch.zeros(3, 50, dtype=torch.long)
    found = noise(model, 5.0, ids)
    bound = 5.0 / (50 * 64) ** 0.5
    assert float(found.abs().max()) <= bound * (1 + 1e-5)
    assert float(found.abs().max()) > 0.99 * bound
    assert float(found.mean()) == pytest.approx(0, abs=0.02 * bound)
    assert float(found.square().mean()) == pytest.approx(bound**2 / 3, rel=0.02)


def test_a_model_has_the_same_noise_in_any_precision() -> None:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Shown().to(dtype)
        nn.init.zeros_(model.embed.weight)
        torch.manual_seed(0)
        found[dtype] = noise(model, 5.0, torch.zeros(2, 3, dtype=torch.long))
        assert found[dtype].dtype == dtype
    assert torch.equal(found[torch.bfloat16], found[torch.float32].bfloat16())


MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 0]])


@pytest.mark.parametrize(
    ("mask", "positions", "expected"),
    [
        (None, None, [[6] * 6] * 2),
        (MASK, None, [[6] * 6, [3] * 6]),
        (None, PACKED, [[3, 3, 3, 2, 2, 1]] * 2),
        (None, torch.arange(6)[None], [[6] * 6] * 2),
        (MASK, torch.tensor([[0, 1, 2, 3, 4, 5], [1, 1, 1, 0, 1, 2]]), [[6] * 6, [1, 1, 1, 3, 3, 3]]),
    ],
)
def test_lengths_are_those_without_padding_and_of_packed_sequences(
    mask: Tensor | None, positions: Tensor | None, expected: list[list[int]]
) -> None:
    assert sequence_lengths(torch.zeros(2, 6, 4), mask, positions).tolist() == expected


def test_padded_and_packed_tokens_have_the_noise_of_their_own_length() -> None:
    torch.manual_seed(0)
    model = Shown(4096)
    padded = noise(model, 1.0, torch.zeros(2, 6, dtype=torch.long), attention_mask=MASK)
    assert float(padded[0].abs().max()) == pytest.approx((6 * 4096) ** -0.5, rel=0.01)
    assert float(padded[1].abs().max()) == pytest.approx((3 * 4096) ** -0.5, rel=0.01)
    packed = noise(model, 1.0, torch.zeros(1, 6, dtype=torch.long), position_ids=PACKED)
    assert float(packed[0, 5].abs().max()) == pytest.approx(4096**-0.5, rel=0.01)
    assert float(packed[0, 3].abs().max()) == pytest.approx((2 * 4096) ** -0.5, rel=0.01)


def test_without_training_there_is_none() -> None:
    model, ids = Shown().eval(), torch.zeros(2, 3, dtype=torch.long)
    assert not noise(model, 5.0, ids).any()


def test_everything_is_as_before_afterwards_and_after_an_error() -> None:
    model, ids = Shown(), torch.zeros(2, 3, dtype=torch.long)
    names = list(model.state_dict())

    def fail() -> None:
        with noisy_embeddings(model, 5.0):
            assert list(model.state_dict()) == names
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(model(ids), model.embed(ids))
    assert not model._forward_pre_hooks
    assert not model.embed._forward_hooks


def test_a_model_that_does_not_show_its_embeddings_is_refused(tmp_path: Path) -> None:
    assert input_embeddings(Tied()) is not None
    with pytest.raises(ConfigError, match="Net has 0 embeddings"):
        Trainer(Net(), arguments(tmp_path, neftune_noise_alpha=5), train_dataset=rows(8)).train()


def test_a_negative_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neftune_noise_alpha"):
        TrainingArguments(str(tmp_path), neftune_noise_alpha=-1.0)


def trained(folder: Path, steps: int = 4, resume: bool = False, **changes: Any) -> Trainer:
    pytest.importorskip("transformers")
    options = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    args = arguments(folder, max_steps=steps, **{"neftune_noise_alpha": 5.0, **options, **changes})
    trainer = Trainer(llama(tied=True), args, train_dataset=text_rows(16), eval_dataset=text_rows(4))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_run_is_repeated_and_resumed_to_the_bit(tmp_path: Path) -> None:
    clean, again = trained(tmp_path / "a"), trained(tmp_path / "b")
    plain = trained(tmp_path / "c", neftune_noise_alpha=None)
    trained(tmp_path / "d", 2)
    resumed = trained(tmp_path / "d", 4, resume=True)
    assert weights_hash(clean.model) == weights_hash(again.model) == weights_hash(resumed.model)
    assert weights_hash(clean.model) != weights_hash(plain.model)


def test_evaluations_and_checkpoints_have_none_of_it(tmp_path: Path) -> None:
    class Once(TrainerCallback):
        found: list[float]

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
        ) -> None:
            self.found.append(metrics["eval_loss"])

    seen = Once()
    seen.found = []
    args = arguments(
        tmp_path, max_steps=2, neftune_noise_alpha=50.0, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2,
    )  # fmt: skip
    trainer = Trainer(llama(), args, train_dataset=text_rows(16), eval_dataset=text_rows(4), callbacks=[seen])
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == seen.found[0]
    embeddings = trainer.model.get_input_embeddings()
    assert not embeddings._forward_hooks
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert saved.keys() <= trainer.model.state_dict().keys()
