"""The balancing loss here is that of transformers. What ranks compute with it is in `tests/trainer/`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.trainer.context_cases import collate, model, samples

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang
from windlass.transforms.whole_balance import WholeBalance, balance, router_sums

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "jamba"])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_that_of_transformers(family: str, masked: bool) -> None:
    own = importlib.import_module(f"transformers.models.{family}.modeling_{family}").load_balancing_loss_func
    logits = tuple(3 * torch.randn(8, 6) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]) if masked else None
    torch.testing.assert_close(balance(router_sums(logits, 2, mask)), own(logits, 6, 2, mask))


def test_sums_of_parts_are_those_of_the_whole_and_their_losses_are_not() -> None:
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    whole, parts = (
        router_sums((logits,), 2, None),
        [router_sums((half,), 2, None) for half in logits.split(4)],
    )
    torch.testing.assert_close(sum(parts), whole)
    assert abs(float(sum(map(balance, parts)) / 2 - balance(whole))) > 1e-4  # type: ignore[arg-type]


def test_batches_that_do_not_count_have_a_loss_of_zero_without_gradients() -> None:
    logits = torch.randn(8, 4, requires_grad=True)
    loss = balance(router_sums((logits,), 2, None) * 0.0)
    loss.backward()
    assert float(loss) == 0
    assert not torch.as_tensor(logits.grad).any()


def test_a_forward_uses_it_and_others_do_not() -> None:
    mixture, other = model("balanced"), model("balanced")
    batch = collate(samples(2))
    expected = mixture(**batch).aux_loss
    called: list[Any] = []
    held = WholeBalance(mixture, Gang(), True, lambda: bool(called.append(1)))
    held.attach()
    torch.testing.assert_close(mixture(**batch).aux_loss, expected)
    assert len(called) == 1
    other(**batch)
    with pytest.raises(ValueError, match="input_ids"):
        mixture()
    other(**batch)
    held.release()
    mixture(**batch)
    assert len(called) == 1


def test_another_definition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = model("balanced")
    namespace = importlib.import_module(type(mixture).__module__)
    monkeypatch.setattr(namespace, "load_balancing_loss_func", lambda *_: torch.tensor(1.0))
    with pytest.raises(ModelError, match="defines the balancing loss of its experts in a way that"):
        WholeBalance(mixture, Gang(), True, lambda: False)
