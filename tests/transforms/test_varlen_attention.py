"""Documents in one kernel of a GPU against each document alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from windlass.transforms.varlen_attention import has_kernel, varlen_attention


def states(device: str, dtype: torch.dtype, heads: int = 4, size: int = 16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 32, size), (2, 2, 32, size), (2, 2, 32, size)]
    return [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for shape in shapes]


def borders_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def test_there_is_none_on_the_processor() -> None:
    assert not has_kernel(*states("cpu", torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 12)])
def test_what_the_kernel_does_not_compute(dtype: torch.dtype, size: int) -> None:
    assert not has_kernel(*states("cuda", dtype, size=size))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_documents_are_those_alone() -> None:
    lengths = [5, 1, 26, 20, 12]
    query, key, value = states("cuda", torch.bfloat16)
    assert has_kernel(query, key, value)
    weights = torch.randn(2, 32, 4, 16, device="cuda")
    found = varlen_attention(query, key, value, borders_of(lengths), max(lengths), None)
    gradients = torch.autograd.grad((found.float() * weights).sum(), (query, key, value))
    exact = [part.detach().double().requires_grad_() for part in (query, key, value)]
    parts = zip(*(part.transpose(1, 2).flatten(0, 1).split(lengths) for part in exact), strict=True)
    alone = [
        scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in document), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for document in parts
    ]
    expected = torch.cat(alone).reshape(2, 32, 4, 16)
    theirs = torch.autograd.grad((expected * weights).sum(), exact)
    assert found.shape == expected.shape
    for one, other in zip([found, *gradients], [expected, *theirs], strict=True):
        assert (one.double() - other).norm() < 1e-2 * other.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_document_does_not_depend_on_another() -> None:
    query, key, value = (part.detach() for part in states("cuda", torch.bfloat16))
    before = varlen_attention(query, key, value, borders_of([10, 22, 32]), 32, None)
    for part in (query, key, value):
        part[0, :, :10] += 1
    after = varlen_attention(query, key, value, borders_of([10, 22, 32]), 32, None)
    assert torch.equal(before.flatten(0, 1)[10:], after.flatten(0, 1)[10:])
    assert not torch.equal(before.flatten(0, 1)[:10], after.flatten(0, 1)[:10])
