"""The trace of an update against what can be known otherwise: sizes that follow from the model, and real gangs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.forecast.models import BATCH, LENGTH, VOCABULARY, llama, mixture, trainer
from tests.zero.needed import needs_deepspeed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from windlass import (
    DPOConfig,
    DPOTrainer,
    ParallelismConfig,
    SFTConfig,
    SFTTrainer,
    SWACallback,
    Trainer,
    TrainingArguments,
)
from windlass.core.errors import ConfigError, DataError, ModelError
from windlass.core.tensors import is_fake
from windlass.forecast.child import apart
from windlass.forecast.forecast import Forecast
from windlass.forecast.meter import WEIGHTS
from windlass.forecast.rehearsal import SomeValues
from windlass.forecast.trace import Trace
from windlass.forecast.tracing import size_of, trace_of
from windlass.zero.building import DividedBuilding


def trace(folder: Path, world: int = 1, whole: bool = True, lean: bool = False, **options: Any) -> Trace:
    """To look whether the loss can be made without logits takes as long as all else: it is not asked for by default."""
    return trace_of(lambda: trainer(folder, lean_loss=lean, **options).train(), world, whole=whole)


def at_most(found: Trace, kind: str) -> int:
    return found.at_most(lambda owner: owner.kind == kind)


def test_weights_gradients_and_state_are_those_of_the_model(tmp_path: Path) -> None:
    bytes_of_weights = sum(p.numel() * 4 for p in llama().parameters())
    found = trace(tmp_path)
    assert found.facts["parameters"] * 4 == at_most(found, "weights") == bytes_of_weights
    assert at_most(found, "gradients") == bytes_of_weights
    steps = 4 * len(list(llama().parameters()))
    assert at_most(found, "optimizer state") == 2 * bytes_of_weights + steps
    assert found.saved["weights"] == bytes_of_weights
    assert not list(tmp_path.iterdir()), "a plan writes nothing into the folder of the run"


def test_of_an_adapter_on_packed_rows_no_base_is_saved(tmp_path: Path) -> None:
    """Nor are packed documents compared, of which a plan has no values."""
    peft = pytest.importorskip("peft")
    small.model().save_pretrained(tmp_path / "base")

    def start() -> None:
        args = SFTConfig(
            str(tmp_path / "run"), packing=True, max_length=16, max_steps=2, use_cpu=True, report_to="none", bf16=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        assert base.name_or_path == base.config.name_or_path == str(tmp_path / "base")
        adapter = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        rows = [{"text": "a b c d e f"}] * 8
        tuner = SFTTrainer(
            base, args, train_dataset=rows, peft_config=adapter, processing_class=small.tokenizer()
        )
        trained.extend(p.numel() * 4 for p in tuner.model.parameters() if p.requires_grad)
        tuner.train()

    trained: list[int] = []
    found = trace_of(start)
    assert found.saved["weights"] == sum(trained) > 0
    assert found.saved["optimizer state"] == 2 * sum(trained) + 4 * len(trained)


def test_a_base_that_is_stored_in_few_bits_is_planned_so(tmp_path: Path) -> None:
    """Its configuration says so, and no option of the script does."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    few = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = small.model()
    model.save_pretrained(tmp_path / "whole")
    model.config.quantization_config = few
    model.config.save_pretrained(tmp_path / "few")

    def weights(name: str, **options: Any) -> int:
        def start() -> None:
            base = LlamaForCausalLM.from_pretrained(tmp_path / name, **options)
            adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
            args = TrainingArguments(str(tmp_path / "run"), max_steps=2, use_cpu=True, report_to="none")
            row = {"input_ids": [1] * 8, "labels": [1] * 8}
            Trainer(adapted, args, train_dataset=[row] * 16).train()

        return at_most(trace_of(start), WEIGHTS)

    assert weights("few") == weights("whole", quantization_config=few) < weights("whole")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.config.save_pretrained(tmp_path / "few")
    with pytest.raises(ModelError, match="a plan of weights quantized by GPTQConfig is not built"):
        weights("few")


@needs_deepspeed
def test_a_run_of_deepspeed_is_refused_before_its_model_is_divided(tmp_path: Path) -> None:
    """Models are divided while they are built, which needs memory; also after another one was built whole."""
    rows = [{"input_ids": [1] * 8, "labels": [1] * 8}] * 8

    def start() -> None:
        args = TrainingArguments(str(tmp_path), deepspeed={"zero_optimization": {"stage": 3}}, use_cpu=True)
        with DividedBuilding.paused():
            llama()
        Trainer(LlamaForCausalLM._from_config(llama().config), args, train_dataset=rows).train()

    with pytest.raises(ConfigError, match="a plan of it is not built"):
        apart(lambda: trace_of(start).to_dict())


def test_an_optimizer_that_reads_its_count_of_steps_is_planned(tmp_path: Path) -> None:
    """Adagrad makes its state with the optimizer, outside of what has no memory."""
    found = trace(tmp_path, optim="adagrad")
    weights = found.saved["weights"]
    assert at_most(found, "optimizer state") == weights + 4 * len(list(llama().parameters()))


def test_an_optimizer_that_compiles_its_update_is_planned_with_its_state_in_few_bits(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    eight, four = (trace(tmp_path, layers=1, optim=f"adamw_torch_{bits}bit") for bits in (8, 4))
    # Two averages of a byte, or half of one, for a weight of four; a few vectors are not quantized.
    assert 2 / 4 < at_most(eight, "optimizer state") / at_most(eight, "weights") < 0.7
    assert 1 / 4 < at_most(four, "optimizer state") / at_most(four, "weights") < 0.4
    assert at_most(four, "optimizer state") == four.saved["optimizer state"]


def test_an_optimizer_without_state_saves_no_bytes_of_it(tmp_path: Path) -> None:
    """Of a stack of which few layers are run, what is 0 for each of them is still in the sum."""
    whole, few = (trace(tmp_path, whole=whole, layers=6, optim="sgd") for whole in (True, False))
    assert few.facts["layers"] == ["model.layers", 6]
    assert few.saved == whole.saved
    assert Forecast(few).disk == few.saved["weights"] > 0


def test_an_average_of_weights_is_held_and_saved_beside_them(tmp_path: Path) -> None:
    def start() -> None:
        run = trainer(tmp_path, lean_loss=False, layers=6, save_only_model=True)
        run.add_callback(SWACallback(start_step=2))
        run.train()

    found = trace_of(start)
    weights = at_most(found, "weights")
    assert at_most(found, "averaged weights") == weights == 4 * found.facts["parameters"]
    # Checkpoints have the average as the model, the weights of training beside it, and here nothing of the optimizer.
    assert found.saved == {"weights": 2 * weights, "optimizer state": 0, "here": 2 * weights}


@pytest.mark.parametrize("whole", [False, True])
def test_this_process_runs_no_backward(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with devices, a process that is forked after one can run none."""
    run: list[object] = []
    own = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda *args, **kwargs: [run.append(args), own(*args, **kwargs)]
    )
    assert at_most(trace(tmp_path, whole=whole, lean=True), "gradients") > 0
    assert not run


@pytest.mark.parametrize("world", [1, 2])
def test_a_machine_with_an_accelerator_plans_the_same(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trace(tmp_path, world, lean=True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert trace(tmp_path, world, lean=True, use_cpu=False).peak == expected.peak


def test_recomputation_and_batch_change_activations_as_they_do(tmp_path: Path) -> None:
    def activations(**options: Any) -> int:
        return at_most(trace(tmp_path, layers=2, **options), "activations")

    plain = activations()
    assert activations(per_device_train_batch_size=2 * BATCH) > 1.9 * plain
    assert activations(activation_checkpointing=True) < 0.7 * plain


def test_activations_of_a_layer_are_what_autograd_keeps_of_it(tmp_path: Path) -> None:
    """One more layer adds, to the byte, what a real forward saves for its backward."""
    one, two = (trace(tmp_path, layers=layers) for layers in (2, 3))
    assert at_most(two, "activations") - at_most(one, "activations") == kept(3) - kept(2)


def kept(layers: int) -> int:
    """Bytes that a real forward keeps, weights aside."""
    model = llama(layers)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=ids, labels=ids, use_cache=False)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, {}, id="alone"),
        pytest.param(1, {"activation_checkpointing": True}, id="recomputed", marks=pytest.mark.slow),
        pytest.param(4, {"fsdp": True, "bf16": True}, id="fsdp", marks=pytest.mark.slow),
    ],
)
def test_layers_that_are_left_out_add_what_they_would(
    tmp_path: Path, world: int, options: dict[str, Any]
) -> None:
    """The trace of four and five layers, continued to seven, is that of seven."""
    whole, added = (trace(tmp_path, world, each, lean=True, layers=7, **options) for each in (True, False))
    assert added.facts["layers"] == ["model.layers", 7]
    assert added.peak[1].total == whole.peak[1].total
    assert added.saved == whole.saved
    assert added.facts["parameters"] == whole.facts["parameters"]
    assert Forecast(added).links() == Forecast(whole).links()
    assert added.peak[1].owners == whole.peak[1].owners
    assert totals(added) == totals(whole)


def totals(found: Trace) -> dict[tuple[str, str], int]:
    """The largest memory at each place, of all layers."""
    most: dict[tuple[str, str], int] = {}
    for instant, held in found.peaks.items():
        key = instant.stage, instant.place
        most[key] = max(most.get(key, 0), held.total)
    return most


def test_ranks_that_shard_hold_parts_and_send_what_theory_says(tmp_path: Path) -> None:
    ranks, weights = 8, sum(p.numel() for p in llama(4).parameters()) * 4
    found = trace(tmp_path, ranks, layers=4, fsdp=True)
    assert at_most(found, "weights") == weights / ranks
    assert at_most(found, "optimizer state") < 2.1 * weights / ranks
    [link] = [link for link in Forecast(found).links() if link.nbytes > 1000]
    # Weights are gathered for the forward and for the backward, those of the root once, and gradients are scattered.
    root = (2 * 320 * 64 + 64) * 4
    assert link.axis == "shard"
    norm = 2 * 8  # the sum of a double
    assert link.nbytes == (3 * weights - root + norm) * (ranks - 1) // ranks


@pytest.mark.parametrize(
    ("shards", "pipeline"), [(3, 1), *(pytest.param(shards, 2, marks=pytest.mark.slow) for shards in (2, 3))]
)
def test_the_parts_of_all_ranks_are_the_model(tmp_path: Path, shards: int, pipeline: int) -> None:
    """Also if the ranks do not divide a size, so that the last part is smaller."""
    layout = ParallelismConfig(dp_shard_size=shards, pp_size=pipeline)
    found = [
        saved(tmp_path, shards * pipeline, rank, parallelism_config=layout)
        for rank in range(shards * pipeline)
    ]
    steps = (
        4 * (shards - 1) * len(list(llama(2).parameters()))
    )  # each part of a parameter has a number of steps
    assert sum(found) == saved(tmp_path, 1, 0) + steps


def saved(folder: Path, world: int, rank: int, **options: Any) -> int:
    """The bytes that a rank has to save."""
    return trace_of(lambda: trainer(folder, layers=2, lean_loss=False, **options).train(), world, rank).saved[
        "here"
    ]


AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "sp", "tp")


def products(world: int, axes: tuple[str, ...] = AXES) -> Iterator[dict[str, int]]:
    """The sizes of axes that make `world` ranks, each 1 or a power of two."""
    if not axes:
        if world == 1:
            yield {}
        return
    for power in range(world.bit_length()):
        size = 1 << power
        if world % size == 0:
            for rest in products(world // size, axes[1:]):
                yield {f"{axes[0]}_size": size} | rest if size > 1 else rest


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks"), [(4, range(4)), (8, (0, 5, 7))])
def test_ranks_of_every_product_of_axes_are_planned_or_refused(
    tmp_path: Path, world: int, ranks: Iterable[int]
) -> None:
    """What one rank is refused, each is refused, in the same words."""
    for sizes in products(world):
        said = {said_to(tmp_path, world, rank, sizes) for rank in ranks}
        assert len(said) == 1, (sizes, said)


def said_to(folder: Path, world: int, rank: int, sizes: dict[str, int]) -> str:
    layout = ParallelismConfig(**sizes)
    layers = max(2, sizes.get("pp_size", 1))
    model = mixture(layers, 8) if "ep_size" in sizes else llama(layers)
    try:
        trace_of(lambda: trainer(folder, model, parallelism_config=layout).train(), world, rank)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_rank_without_replicas_divides_layers(tmp_path: Path) -> None:
    """All ranks are in one tensor gang: no other has the same gradients to compare."""
    layout = {"fsdp": True, "parallelism_config": ParallelismConfig(tp_size=2)}
    found = trace(tmp_path, 2, layers=2, **layout)
    assert {link.axis for link in Forecast(found).links() if link.nbytes > 1000} == {"tensor"}
    assert at_most(found, "weights") < 4 * found.facts["parameters"]


def test_replicas_reduce_each_gradient_once_an_update(tmp_path: Path) -> None:
    ranks, weights = 4, sum(p.numel() for p in llama(1).parameters()) * 4
    for accumulation in (1, 5):
        found = trace(tmp_path, ranks, layers=1, gradient_accumulation_steps=accumulation)
        [link] = Forecast(found).links()
        assert (link.axis, link.nbytes) == ("replicate", 2 * weights * (ranks - 1) // ranks)


def test_micro_batches_in_the_middle_are_counted(tmp_path: Path) -> None:
    flops = [
        sum(
            work.flops * times
            for work, times in trace(tmp_path, layers=1, gradient_accumulation_steps=count).work.items()
        )
        for count in (1, 6)
    ]
    assert flops[1] == 6 * flops[0] > 0


def test_positions_are_those_of_tokens_whatever_is_beside_them(tmp_path: Path) -> None:
    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows])
        mask = torch.zeros(len(rows), 1, LENGTH, LENGTH)  # who attends to whom
        return {"input_ids": ids, "labels": ids, "attention_mask": mask}

    def start() -> None:
        made = trainer(tmp_path, layers=1, lean_loss=False)
        made.data_collator = collate
        made.train()

    assert trace_of(start).facts["positions"] == size_of(start).positions == BATCH * LENGTH


def test_a_script_without_a_run_is_an_error() -> None:
    with pytest.raises(ModelError, match="without a call of"):
        trace_of(lambda: None)
    with pytest.raises(RuntimeError) as caught:
        trace_of(lambda: llama(1).lm_head.weight.sum().item())
    assert "trains in a loop of its own, cannot be planned" in caught.value.__notes__[-1]


def test_a_loss_of_a_script_is_traced(tmp_path: Path) -> None:
    """It reads the count and multiplies by the number of processes, and a second model learns nothing. Its batches are
    views.
    """

    class Own(Trainer):
        teacher: Any = None

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            with torch.no_grad():
                known = self.teacher(**inputs).logits
            logits = model(**inputs).logits - known
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return loss / num_items_in_batch * self.accelerator.num_processes

    def collate(rows: Any) -> dict[str, torch.Tensor]:
        ids = torch.cat([row["input_ids"] for row in rows]).view(BATCH, LENGTH)
        return {"input_ids": ids, "labels": ids}

    def start() -> None:
        base = trainer(tmp_path, layers=1, gradient_accumulation_steps=2)
        own = Own(base.model, base.args, train_dataset=base.train_dataset, data_collator=collate)
        own.teacher = llama(layers=3)
        own.train()

    found = trace_of(start, 2)
    assert at_most(found, "logits") >= 4 * BATCH * LENGTH * VOCABULARY
    assert at_most(found, "other models") >= 4 * sum(p.numel() for p in llama(layers=3).parameters())


def test_a_reference_is_held_unless_all_of_it_is_computed_before_training(tmp_path: Path) -> None:
    rows = [{"prompt": "a b", "chosen": " c d", "rejected": " e"}] * 4

    def held(**options: Any) -> int:
        def start() -> None:
            args = DPOConfig(
                str(tmp_path), max_steps=1, use_cpu=True, report_to="none", bf16=False, **options
            )
            DPOTrainer(
                small.model(), args=args, train_dataset=rows, processing_class=small.tokenizer()
            ).train()

        return at_most(trace_of(start), "other models")

    assert held() == 4 * sum(p.numel() for p in small.model().parameters())
    assert held(precompute_ref_log_probs=True) == 0


def test_what_the_run_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="global_batch_size"):
        trace(tmp_path, global_batch_size=7)
    small = llama(vocab_size=4)
    with pytest.raises(DataError, match=r"the token \d+ is outside the model's vocabulary"):
        trace_of(lambda: trainer(tmp_path, small).train())


def test_of_a_device_no_memory_on_the_host_is_planned(tmp_path: Path) -> None:
    def start() -> None:
        trainer(tmp_path, lean_loss=False, fsdp="full_shard offload").train()

    with pytest.raises(ConfigError, match=r"fsdp.cpu_offload=True: keeps memory on the host"):
        trace_of(start, 2, on_device=True)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    """After a trace modules have memory again, and a real run of the same Trainer goes on as ever."""
    register, apply = torch.nn.Module.register_parameter, torch.nn.Module._apply
    trace(tmp_path, 4, fsdp=True)
    assert torch.nn.Module.register_parameter is register
    assert torch.nn.Module._apply is apply
    assert not torch.distributed.is_initialized()
    assert not is_fake(llama().lm_head.weight)
    assert trainer(tmp_path).train().global_step == 2


def test_experts_without_memory_are_multiplied_with_rows_that_have_some() -> None:
    """As while a run is built: a check of divided rows runs a model of which only some weights have memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        experts = torch.empty(2, 4, 8)
    rows, ends = torch.zeros(6, 4), torch.tensor([3, 6], dtype=torch.int32)
    with SomeValues():  # type: ignore[no-untyped-call]
        found = torch.ops.aten._grouped_mm.default(rows, experts, ends)
    assert is_fake(found)
    assert (found.shape, found.dtype) == ((6, 8), torch.float32)
