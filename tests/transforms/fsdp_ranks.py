"""Run on ranks: sharded training, held against one process that sees the whole batch."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from windlass.checkpoint.content import Content
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.optimizer_state import (
    load_optimizer_state,
    save_optimizer_state,
    split_optimizer_state,
)
from windlass.checkpoint.sharded import parts_of_rank
from windlass.checkpoint.store import Store
from windlass.checkpoint.weights import load_weights, save_weights
from windlass.config.plan import DistPlan, ShardPlan
from windlass.core.errors import CheckpointError, ConfigError, ModelError
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.dist.sharded import copies, copy_whole_, is_sharded, whole
from windlass.transforms.first_rank import to_meta
from windlass.transforms.fsdp import FullyShardedModel
from windlass.transforms.rebind import names_of, rebind

RANK, SIZE, CPU = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), torch.device("cpu")
WORDS = 11


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 13), nn.Linear(13, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tiny(nn.Module):
    """A language model with tied embeddings, a frozen layer, a scalar, and sizes that no number of ranks divides."""

    def __init__(self, width: int = 7, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.mixer = nn.Linear(width, width)
        self.mixer.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mixer(self.embed(tokens)) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def model(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny().double()


def updates(count: int, accumulation: int) -> Iterator[list[list[Tensor]]]:
    """For each update its micro-batches, each of them one ragged row of tokens for every rank."""
    random = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield [
            [
                torch.randint(WORDS, (1, int(torch.randint(2, 9, (), generator=random))), generator=random)
                for _ in range(SIZE)
            ]
            for _ in range(accumulation)
        ]


def loss_sum(module: nn.Module, tokens: Tensor) -> Tensor:
    logits = module(tokens)[0]
    return nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum")


def targets(group: list[list[Tensor]]) -> int:
    return sum(row.shape[1] - 1 for micro in group for row in micro)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": trained[:3]}, {"params": trained[3:], "weight_decay": 0.0}], lr=0.01)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))


MAX_NORM = 0.5


def alone(steps: int, accumulation: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    module = model()
    optimizer = optimizer_of(module)
    schedule = schedule_of(optimizer)
    log = []
    for group in updates(steps, accumulation):
        losses = [loss_sum(module, row) / targets(group) for micro in group for row in micro]
        torch.stack(losses).sum().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        log.append((float(torch.stack(losses).detach().sum()), float(norm)))
    return log, module.state_dict()


def sharded(
    gang: Gang, steps: int, accumulation: int, plan: ShardPlan, seed: int | None = None
) -> tuple[list[tuple[float, float]], FullyShardedModel]:
    module = model(RANK if seed is None else seed)  # rank 0's weights are decisive
    optimizer = optimizer_of(module)
    schedule, before = schedule_of(optimizer), names_of(module)
    strategy = FullyShardedModel(module, DistPlan(strategy="fsdp", shard=plan), gang, CPU)
    rebind(optimizer, before, module)
    log = []
    for group in updates(steps, accumulation):
        total = torch.zeros((), dtype=torch.float64)
        for index, micro in enumerate(group):
            with strategy.micro(last=index == accumulation - 1):
                loss = loss_sum(strategy.model, micro[RANK]) / targets(group)
                (loss * SIZE).backward()
            total += loss.detach()
        strategy.check_reached()
        norm = strategy.total_norm([p.grad for p in module.parameters() if p.grad is not None])
        assert type(norm) is Tensor
        factor = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
        for gradient in strategy.local([p.grad for p in module.parameters() if p.grad is not None]):
            gradient.mul_(factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        log.append((float(gang.sum_on_device(total)), float(norm)))
    return log, strategy


def compare(gang: Gang, plan: ShardPlan, steps: int, accumulation: int) -> FullyShardedModel:
    expected, weights = alone(steps, accumulation)
    log, strategy = sharded(gang, steps, accumulation, plan)
    for (loss, norm), (own_loss, own_norm) in zip(expected, log, strict=True):
        assert math.isclose(loss, own_loss, rel_tol=1e-12), (plan, loss, own_loss)
        assert math.isclose(norm, own_norm, rel_tol=1e-12), (plan, norm, own_norm)
    state = strategy.whole_state()
    if RANK == 0:
        assert set(state) == set(weights)
        assert max(float((weights[name] - state[name]).abs().max()) for name in weights) < 1e-12
    return strategy


BLOCKS: dict[str, Any] = {"wrap": "transformer", "layers": ("Block",)}
FEW: dict[str, Any] = {"wrap": "size", "min_parameters": 100}


def every_plan(gang: Gang, count: int) -> None:
    compare(gang, ShardPlan(**BLOCKS), count, 3)
    compare(gang, ShardPlan(), count, 1)
    for plan in (
        ShardPlan(reshard=False, forward_prefetch=2, backward_prefetch=2, **BLOCKS),
        ShardPlan(replicas=SIZE, **BLOCKS),
        ShardPlan(cpu_offload=True, **BLOCKS),
        ShardPlan(recompute=True, **BLOCKS),
        ShardPlan(ignored="blocks.1|mixer", **FEW),
    ):
        compare(gang, plan, min(4, count // 2), 3)


def hybrid(gang: Gang, count: int) -> None:
    for plan in (
        ShardPlan(replicas=2, **BLOCKS),
        ShardPlan(replicas=2, ignored=("blocks.1",), **BLOCKS),
        ShardPlan(reshard=2, **BLOCKS),
    ):
        strategy = compare(gang, plan, min(4, count // 2), 2)
        parameter = strategy.module.get_parameter("blocks.0.up.weight")
        assert copies(parameter) == plan.replicas


def whole_weights(gang: Gang) -> None:
    """Rank 0's decide, whatever the others hold; whole within `gathered`, however often a rank goes forward there."""
    module, reference = model(RANK), model(0).state_dict()
    strategy = FullyShardedModel(module, DistPlan(strategy="fsdp", shard=ShardPlan(**BLOCKS)), gang, CPU)
    with strategy.gathered():
        for _ in range(1 + RANK):
            strategy.model(torch.ones(1, 4, dtype=torch.long))
        assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
        assert all(torch.equal(value, reference[name]) for name, value in module.named_parameters())
    assert is_sharded(module.head.weight)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.shift, model(0).shift), (
        "buffers that no checkpoint holds have rank 0's values too"
    )
    other = model(3).state_dict()
    for name, tensor in module.state_dict(keep_vars=True).items():
        copy_whole_(tensor, other[name])
    assert_state(strategy, model(3))
    again = FullyShardedModel(module, DistPlan(strategy="fsdp", shard=ShardPlan(**BLOCKS)), gang, CPU)
    assert_state(again, model(3))


def assert_state(strategy: FullyShardedModel, module: nn.Module) -> None:
    state = strategy.whole_state()
    assert RANK != 0 or same_tensors(state, module.state_dict())


def same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def one_copy_on_the_host(gang: Gang) -> None:
    """Ranks other than the first start without memory."""
    module = model(4) if RANK == 0 else to_meta(model(RANK))
    assert RANK == 0 or module.head.weight is module.embed.weight
    plan = ShardPlan(ignored="mixer", ram_efficient=True, **BLOCKS)
    strategy = FullyShardedModel(module, DistPlan(strategy="fsdp", shard=plan), gang, CPU)
    assert_state(strategy, model(4))
    assert torch.equal(module.shift, model(4).shift)
    assert module.head.weight is module.embed.weight
    assert not module.mixer.weight.requires_grad
    with strategy.micro(last=True):
        loss_sum(module, torch.ones(1, 4, dtype=torch.long)).backward()
    strategy.check_reached()


def refusals(gang: Gang) -> None:
    plan = DistPlan(strategy="fsdp", shard=ShardPlan())
    with pytest.raises(ModelError, match="differs from rank 0's"):
        FullyShardedModel(Tiny(blocks=2 + RANK), plan, gang, CPU)
    with pytest.raises(ModelError, match="rank 0's model is on the meta device"):
        FullyShardedModel(to_meta(model()), plan, gang, CPU)
    with pytest.raises(ConfigError, match=r"(?s)ddp_bucket_cap_mb=5.*comm_hook='fp16'"):
        FullyShardedModel(model(), DistPlan(strategy="fsdp", bucket_cap_mb=5, comm_hook="fp16"), gang, CPU)
    with pytest.raises(ConfigError, match="dp_replicate_size=3: must divide the number of processes"):
        FullyShardedModel(model(), DistPlan(strategy="fsdp", shard=ShardPlan(replicas=3)), gang, CPU)
    mixed = model()
    mixed.blocks[1].up.half()
    for computed in (None, "bf16"):
        shard = ShardPlan(param_dtype=computed, **BLOCKS)
        with pytest.raises(
            ModelError, match=r"Block trains parameters of several dtypes \(torch.float16, torch.float64"
        ):
            FullyShardedModel(mixed, DistPlan(strategy="fsdp", shard=shard), gang, CPU)
    before = FullyShardedModel(model(), plan, gang, CPU).module
    FullyShardedModel(before, DistPlan(strategy="fsdp", shard=ShardPlan(state="sharded")), gang, CPU)
    with pytest.raises(ConfigError, match=r"fsdp \(reshard\)=False: this model was sharded with True"):
        FullyShardedModel(before, DistPlan(strategy="fsdp", shard=ShardPlan(reshard=False)), gang, CPU)


def unused(gang: Gang) -> None:
    """Ranks that use different layers, where they say so."""
    plan = DistPlan(strategy="fsdp", find_unused_parameters=True, shard=ShardPlan(**BLOCKS))
    strategy, reference = FullyShardedModel(model(), plan, gang, CPU), model()
    row = torch.ones(1, 4, dtype=torch.long)
    with strategy.micro(last=True):
        loss_sum(Skipping(strategy.model, RANK), row).backward()
    for rank in range(SIZE):
        (loss_sum(Skipping(reference, rank), row) / SIZE).backward()
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            own = whole(strategy.module.get_parameter(name).grad)
            assert torch.allclose(own, parameter.grad, rtol=1e-12), name
    some = [p.grad for p in strategy.module.parameters() if p.grad is not None and RANK == 0]
    norm = strategy.total_norm(some)
    assert float(norm) > 0, "a rank without gradients keeps no rank waiting, and gets the norm too"
    assert float(gang.sum(norm.double() / SIZE)) == float(norm)


def used_by_some(gang: Gang) -> None:
    """Without that word two layers of equal shapes would get each other's gradients."""
    strategy = FullyShardedModel(model(), DistPlan(strategy="fsdp", shard=ShardPlan()), gang, CPU)
    row = torch.ones(1, 4, dtype=torch.long)
    with strategy.micro(last=True):
        loss_sum(strategy.model, row).backward()
    strategy.check_used()
    strategy.module.zero_grad()
    with strategy.micro(last=True):
        loss_sum(Skipping(strategy.model, RANK), row).backward()
    with pytest.raises(
        ModelError, match=r"(?s)rank 0: blocks\.1\.norm\.weight.*rank 1: blocks\.0\.norm\.weight.*find_unused"
    ):
        strategy.check_used()


class Skipping:
    """A model of which this rank leaves one block out."""

    def __init__(self, module: nn.Module, left_out: int) -> None:
        self.module, self.left_out = module, left_out

    def __call__(self, tokens: Tensor) -> Tensor:
        blocks = self.module.blocks[self.left_out]
        hook = blocks.register_forward_hook(lambda block, arguments, output: arguments[0], prepend=True)
        try:
            return self.module(tokens)
        finally:
            hook.remove()


def recovers(gang: Gang) -> None:
    """An error in a forward leaves nothing behind; a forward past the model is found out."""
    strategy = FullyShardedModel(model(), DistPlan(strategy="fsdp", shard=ShardPlan(**BLOCKS)), gang, CPU)
    row = torch.ones(1, 4, dtype=torch.long)
    for wrong in (torch.full((1, 4), WORDS), row):
        with pytest.raises((KeyError, IndexError)):
            fail_in_a_micro_batch(strategy, wrong)
    strategy.module.zero_grad()
    strategy.check_reached()
    with pytest.raises(ModelError, match="bypassed the sharded model"):
        strategy.check_reached()
    with strategy.micro(last=True):
        (loss_sum(strategy.model, row)).backward()
    reference = model()
    loss_sum(reference, row).backward()
    for name, parameter in reference.named_parameters():
        own = strategy.module.get_parameter(name).grad
        assert (own is None) == (parameter.grad is None), name
        assert own is None or torch.allclose(whole(own), parameter.grad), name
    assert float(strategy.max_over_ranks(torch.tensor(float(RANK)))) == SIZE - 1


def own_statistics(gang: Gang) -> None:
    """Each rank has and saves its own; within the context all have rank 0's."""
    strategy = FullyShardedModel(nn.BatchNorm1d(2), DistPlan(strategy="fsdp", shard=ShardPlan()), gang, CPU)
    mean = strategy.module.get_buffer("running_mean").fill_(RANK)
    with strategy.buffers_of_first_rank():
        assert not mean.any()
    assert torch.equal(strategy.own.state_dict()["running_mean"], torch.full((2,), float(RANK)))


def hugging_face(gang: Gang) -> None:
    """A model that names its layers itself, with tied weights; ranks generate different numbers of tokens."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(config).double()
    module = transformers.GPT2LMHeadModel(config).double()
    plan = ShardPlan(wrap="transformer", recompute=True)
    module.load_state_dict(reference.state_dict())
    strategy = FullyShardedModel(module, DistPlan(strategy="fsdp", shard=plan), gang, CPU)
    assert sum(isinstance(member, FSDPModule) for member in module.modules()) == 3
    tokens = torch.arange(12).reshape(2, 6)
    for one in (reference, module):
        one.train()
    with strategy.micro(last=True):
        module(input_ids=tokens[RANK : RANK + 1], labels=tokens[RANK : RANK + 1]).loss.backward()
    reference(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in reference.named_parameters():
        assert torch.allclose(whole(module.get_parameter(name).grad), parameter.grad, rtol=1e-10), name
    options = {"max_new_tokens": 2 + 3 * RANK, "do_sample": False, "pad_token_id": 0}
    for one in (reference, module):
        one.eval()
    with strategy.gathered():
        said = module.generate(tokens[:1], **options)
    assert torch.equal(said, reference.generate(tokens[:1], **options))


def fail_in_a_micro_batch(strategy: FullyShardedModel, row: Tensor) -> None:
    with strategy.micro(last=False):
        loss_sum(strategy.model, row).backward()
        raise KeyError


def carried_state(gang: Gang, folder: Path) -> None:
    """State that an optimizer has before its model is sharded comes along; it is saved whole, and loaded into
    another split."""
    module = model()
    optimizer, before = optimizer_of(module), names_of(module)
    schedule, groups = schedule_of(optimizer), list(optimizer.param_groups)
    loss_sum(module, torch.ones(1, 4, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()
    reference = copy.deepcopy(save_optimizer_state(optimizer, module))
    weights = copy.deepcopy(module.state_dict())
    strategy = FullyShardedModel(module, DistPlan(strategy="fsdp", shard=ShardPlan(**BLOCKS)), gang, CPU)
    for _ in range(2):
        rebind(optimizer, before, module)
    assert schedule.optimizer is optimizer
    assert all(group is kept for group, kept in zip(optimizer.param_groups, groups, strict=True))
    assert_optimizer(optimizer, module, reference)
    state = strategy.whole_state()
    if RANK == 0:
        save_weights(folder, state)
    gang.barrier()
    other = model(9)
    plan = DistPlan(strategy="fsdp", shard=ShardPlan(replicas=SIZE, **BLOCKS))
    loaded = FullyShardedModel(other, plan, gang, CPU)
    load_weights(folder, other)
    state = loaded.whole_state()
    assert RANK != 0 or same_tensors(state, weights)
    second = optimizer_of(other)
    for _ in range(2):  # into an optimizer that has no state yet, and into one that has
        load_optimizer_state(second, other, reference)
        assert_optimizer(second, other, reference)
    odd = copy.deepcopy(reference)
    odd["state"]["embed.weight"]["rows"] = torch.zeros(WORDS)
    with pytest.raises(CheckpointError, match=r"keeps 'rows' of shape \[11\] for 'embed.weight'"):
        load_optimizer_state(second, other, odd)


def in_parts(gang: Gang, folder: Path, earlier: Path) -> None:
    """Every rank writes what it holds, within a checkpoint; any number of ranks reads it."""
    module = model(RANK)
    optimizer, before = optimizer_of(module), names_of(module)
    plan = DistPlan(strategy="fsdp", shard=ShardPlan(replicas=SIZE // 2, ignored="blocks.1", **BLOCKS))
    strategy = FullyShardedModel(module, plan, gang, CPU)
    rebind(optimizer, before, module)
    for _ in range(2):
        with strategy.micro(last=True):
            loss_sum(module, torch.ones(1, 4, dtype=torch.long)).backward()
        optimizer.step()
    store = Store(folder, all_ranks=gang)
    state, parts = split_optimizer_state(optimizer, module)

    sets = {"model": module.state_dict(keep_vars=True), "optimizer": parts}
    saved = CheckpointManager(store).save(
        SIZE,
        Content({"optimizer": state}, parts=[parts_of_rank(*item, gang) for item in sets.items()]),
        meta={},
    )
    assert saved is not None
    weights, reference = strategy.whole_state(), save_optimizer_state(optimizer, module)
    for source in (saved, earlier) if earlier.exists() else (saved,):
        other = model(9)
        loaded = FullyShardedModel(other, DistPlan(strategy="fsdp", shard=ShardPlan(**BLOCKS)), gang, CPU)
        second = optimizer_of(other)
        checkpoint = CheckpointManager(store).load(source)
        checkpoint.load_weights(other)
        read = loaded.whole_state()
        assert RANK != 0 or same_tensors(read, weights), "what both runs came to"
        for _ in range(2):
            checkpoint.load_optimizer(second, other)
            assert_optimizer(second, other, reference)


def assert_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, reference: dict[str, Any]) -> None:
    state = save_optimizer_state(optimizer, module)
    if RANK == 0:
        assert state["groups"] == reference["groups"]
        assert state["state"].keys() == reference["state"].keys()
        assert all(same_tensors(entry, reference["state"][name]) for name, entry in state["state"].items())


def low_precision(gang: Gang) -> None:
    plan = ShardPlan(param_dtype="bf16", reduce_dtype="fp32", output_dtype="fp32", **BLOCKS)
    strategy = FullyShardedModel(model().float(), DistPlan(strategy="fsdp", shard=plan), gang, CPU)
    strategy.module.shift = strategy.module.shift.bfloat16()
    seen = []
    strategy.module.blocks[0].up.register_forward_hook(lambda m, a, output: seen.append(output.dtype))
    with strategy.micro(last=True):
        logits = strategy.model(torch.ones(1, 4, dtype=torch.long))
        logits.sum().backward()
    assert seen == [torch.bfloat16]
    assert logits.dtype == torch.float32
    assert strategy.module.embed.weight.grad.dtype == torch.float32


def main(folder: Path, count: int) -> None:
    gang = join(world_from_environment(), CPU, 60)
    if SIZE > 2:
        hybrid(gang, count)
    else:
        every_plan(gang, count)
        for check in (
            whole_weights,
            one_copy_on_the_host,
            refusals,
            *((unused,) if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else ()),  # torch 2.13
            used_by_some,
            recovers,
            own_statistics,
            hugging_face,
            low_precision,
        ):
            check(gang)
    carried_state(gang, folder)
    in_parts(gang, folder, folder / "checkpoint-4")
    gang.barrier()
    leave()
