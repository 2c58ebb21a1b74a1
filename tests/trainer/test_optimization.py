"""Optimizer and schedule: made, given, overridden; `model_init`; what every update receives."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer import unfrozen_runs
from tests.trainer.small import Net, arguments, rows, settings, weights_hash
from tests.trainer.unfrozen_runs import TwoLayers, samples, train
from torch import nn

from windlass import Trainer, TrainingArguments, get_linear_schedule_with_warmup
from windlass.core.errors import ConfigError, ModelError
from windlass.trainer.uncalled import NEVER_CALLED


class Noisy(Net):
    """Draws in its forward, so that a run depends on the seed."""

    def forward(self, x: Any, labels: Any = None) -> Any:
        return super().forward(nn.functional.dropout(x, 0.3, self.training), labels)


def test_given_objects_are_used_and_kept(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 6)
    trainer = Trainer(
        model, arguments(tmp_path, logging_steps=1), train_dataset=rows(16), optimizers=(optimizer, scheduler)
    )
    trainer.train()
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is scheduler
    assert scheduler.last_epoch == 4
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.375])
    assert optimizer.state[model.layer.weight]["momentum_buffer"].abs().sum() > 0


def test_a_given_optimizer_gets_a_schedule(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    trainer = Trainer(
        model, arguments(tmp_path, logging_steps=1), train_dataset=rows(16), optimizers=(optimizer, None)
    )
    trainer.train()
    assert trainer.optimizer is optimizer
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(("updates", "said"), [(5, 1), (4, 0)])
def test_a_warmup_beyond_the_run_is_remarked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, updates: int, said: int
) -> None:
    trainer = Trainer(Net(), arguments(tmp_path, warmup_steps=updates), train_dataset=rows(16))
    trainer.create_optimizer_and_scheduler(4)
    assert caplog.text.count(f"warmup_steps={updates}: is longer than the run of 4 updates") == said


def test_arguments_of_a_script_count_the_warmup(tmp_path: Path) -> None:
    """Two of four updates, though `warmup_steps` is 0."""

    class Arguments(TrainingArguments):
        def get_warmup_steps(self, num_training_steps: int) -> int:
            return num_training_steps // 2

    trainer = Trainer(Net(), Arguments(**settings(tmp_path, logging_steps=1)), train_dataset=rows(16))
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.025])


def test_given_objects_resume(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        args = arguments(tmp_path, max_steps=6, save_strategy="steps", save_steps=2)
        return Trainer(model, args, train_dataset=rows(24), optimizers=(optimizer, scheduler))

    whole, resumed = trainer(), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert weights_hash(whole.model) == weights_hash(resumed.model)
    assert resumed.lr_scheduler.last_epoch == 6


def test_contradictions_are_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="optimizer_cls_and_kwargs"):
        Trainer(
            model,
            arguments(tmp_path),
            optimizers=(optimizer, None),
            optimizer_cls_and_kwargs=(torch.optim.SGD, {}),
        )
    with pytest.raises(ConfigError, match="model_init"):
        Trainer(args=arguments(tmp_path), model_init=Net, optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match="exactly one"):
        Trainer(model, arguments(tmp_path), model_init=Net)
    with pytest.raises(ConfigError, match="exactly one"):
        Trainer(args=arguments(tmp_path))


def test_a_class_or_a_factory_makes_the_optimizer(tmp_path: Path) -> None:
    made: list[Any] = []

    def factory(params: Any, lr: float) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(params, lr=lr, momentum=0.5))
        return made[-1]

    for cls in (torch.optim.RMSprop, factory, functools.partial(torch.optim.Adam, betas=(0.8, 0.9))):
        trainer = Trainer(
            Net(), arguments(tmp_path), train_dataset=rows(16), optimizer_cls_and_kwargs=(cls, {"lr": 0.25})
        )
        before = weights_hash(trainer.model)
        trainer.train()
        assert weights_hash(trainer.model) != before
    assert isinstance(trainer.optimizer, torch.optim.Adam)
    assert trainer.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert len(made) == 1


def test_of_several_kinds_of_parameters_in_the_keywords_the_last_is_used(tmp_path: Path) -> None:
    """As in transformers: a class for each layer gets `optimizer_dict`, beside `params`."""
    seen: list[Any] = []

    class Layers(torch.optim.SGD):
        def __init__(self, layers: dict[str, Any], lr: float) -> None:
            seen.append(layers)
            super().__init__(list(layers.values()), lr=lr)

    model = Net()
    layers = dict(model.named_parameters())
    given = {"lr": 0.1, "params": [model.layer.bias], "optimizer_dict": layers}
    trainer = Trainer(
        model, arguments(tmp_path), train_dataset=rows(16), optimizer_cls_and_kwargs=(Layers, given)
    )
    trainer.create_optimizer()
    assert seen == [layers]


def test_overridden_parts_are_used(tmp_path: Path) -> None:
    class Mine(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.asked = num_training_steps
            target = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(target, lambda step: 0.5**step)
            return self.lr_scheduler

    trainer = Mine(Net(), arguments(tmp_path, logging_steps=1), train_dataset=rows(16))
    trainer.train()
    assert trainer.asked == 4
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.3, 0.15, 0.075, 0.0375])

    class Both(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)

    trainer = Both(Net(), arguments(tmp_path), train_dataset=rows(16))
    trainer.train()
    assert isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ConstantLR)


def test_decay_names_may_be_overridden(tmp_path: Path) -> None:
    class Mine(Trainer):
        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            return ["layer.bias"]

    trainer = Mine(Net(), arguments(tmp_path, weight_decay=0.1))
    groups = trainer.create_optimizer().param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["params"][0] is trainer.model.layer.bias


def test_a_bare_parameter_named_bias_does_not_decay(tmp_path: Path) -> None:
    class Bare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))
            self.norm = nn.LayerNorm(3)
            self.scale = nn.Parameter(torch.ones(3))

    trainer = Trainer(Bare(), arguments(tmp_path, weight_decay=0.1))
    assert trainer.get_decay_parameter_names(trainer.model) == ["layer.weight", "scale"]


def test_model_init_makes_every_run_the_same(tmp_path: Path) -> None:
    def init() -> nn.Module:
        model = Noisy()
        nn.init.normal_(model.layer.weight)
        return model

    trainer = Trainer(args=arguments(tmp_path), model_init=init, train_dataset=rows(20))
    hashes = []
    for seed in (42, 42, 7, 42):
        trainer.args.seed = seed
        trainer.train()
        hashes.append(weights_hash(trainer.model))
        assert trainer.callback_handler.model is trainer.model
    assert hashes[0] == hashes[1] == hashes[3]
    assert hashes[0] != hashes[2]


def test_model_init_may_take_the_trial(tmp_path: Path) -> None:
    seen: list[Any] = []

    def init(trial: Any) -> nn.Module:
        seen.append(trial)
        return Net()

    trainer = Trainer(args=arguments(tmp_path), model_init=init, train_dataset=rows(8))
    trainer.train(trial={"a": 1})
    assert seen == [None, {"a": 1}]
    with pytest.raises(ModelError, match="None"):
        Trainer(args=arguments(tmp_path), model_init=lambda: None)


def test_a_second_call_goes_on_with_the_weights_and_a_new_schedule(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path, logging_steps=1), train_dataset=rows(16))
    trainer.train()
    first, optimizer = weights_hash(trainer.model), trainer.optimizer
    trainer.args.max_steps = 2
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == 2
    assert weights_hash(trainer.model) != first
    assert trainer.optimizer is optimizer
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.05, 0.025])


@pytest.mark.parametrize("metric_first", [True, False])
def test_a_plateau_schedule_follows_the_evaluations(tmp_path: Path, metric_first: bool) -> None:
    args = arguments(
        tmp_path, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps", eval_steps=1, logging_steps=1, metric_for_best_model="loss", learning_rate=1e-12,
        eval_on_start=metric_first,
    )  # fmt: skip
    trainer = Trainer(Net(), args, train_dataset=rows(16), eval_dataset=rows(4))
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    # Nothing gets better: the first evaluation *after an update* sets the mark, each later one halves.
    assert rates == pytest.approx([1e-12, 1e-12, 5e-13, 2.5e-13])


def test_learning_rates_and_sizes(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=rows(16))
    with pytest.raises(ConfigError, match="optimizer"):
        trainer.get_learning_rates()
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    assert trainer.get_learning_rates() == [0.05, 0.05]
    layer = trainer.model.layer
    assert trainer.get_optimizer_group() == [[layer.weight], [layer.bias]]
    assert trainer.get_optimizer_group(layer.bias) is trainer.optimizer.param_groups[1]
    assert trainer.get_optimizer_group(nn.Parameter(torch.zeros(1))) is None
    trainer.model.layer.bias.requires_grad_(False)
    assert trainer.get_num_trainable_parameters() == 12


def test_the_cache_is_emptied_every_so_often(tmp_path: Path) -> None:
    trainer = Trainer(
        Net(), arguments(tmp_path, torch_empty_cache_steps=2, max_steps=5), train_dataset=rows(24)
    )
    emptied: list[int] = []
    trainer.accelerator.free_memory = lambda: emptied.append(trainer.state.global_step)
    trainer.train()
    assert emptied == [2, 4]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_accelerator_says_inside_a_step(tmp_path: Path, accumulation: int) -> None:
    synced: list[bool] = []

    class Watches(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            synced.append(self.accelerator.sync_gradients)
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = Watches(
        Net(), arguments(tmp_path, gradient_accumulation_steps=accumulation, max_steps=2), train_dataset=rows(24),
    )  # fmt: skip
    trainer.train()
    assert synced == 2 * ([False] * (accumulation - 1) + [True])


def test_full_determinism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)  # put back at the end
    hashes = set()
    before = {name: os.environ.get(name) for name in os.environ}
    try:
        for _ in range(2):
            trainer = Trainer(Noisy(), arguments(tmp_path, full_determinism=True), train_dataset=rows(16))
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
            trainer.train()
            hashes.add(weights_hash(trainer.model))
    finally:
        torch.use_deterministic_algorithms(False)
        for name in set(os.environ) - set(before):
            del os.environ[name]
    assert len(hashes) == 1


# No run here pushes, or divides sequences.
@pytest.mark.parametrize(
    "name", sorted(NEVER_CALLED.keys() - {"_push_from_checkpoint", "_prepare_context_parallel_inputs"})
)
def test_an_override_that_would_never_be_called_is_refused(tmp_path: Path, name: str) -> None:
    kind = type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: None})
    trainer = kind(Net(), arguments(tmp_path), train_dataset=rows(8))
    with pytest.raises(ConfigError, match=name):
        trainer.train()


@pytest.mark.parametrize(
    ("owner", "name"),
    [("accelerator", "no_sync"), ("accelerator", "prepare"), ("args", "should_save")],
)
def test_neither_is_one_on_the_arguments_or_the_accelerator(tmp_path: Path, owner: str, name: str) -> None:
    class Arguments(TrainingArguments):
        pass

    if owner == "args":
        setattr(Arguments, name, property(lambda self: False))
    trainer = Trainer(Net(), Arguments(**settings(tmp_path)), train_dataset=rows(8))
    if owner == "accelerator":
        setattr(trainer.accelerator, name, lambda *args, **kwargs: None)
    with pytest.raises(ConfigError, match=rf"{owner}\.{name}='overridden'"):
        trainer.train()


@pytest.mark.parametrize("name", ["_get_train_sampler", "_prepare_input", "floating_point_ops", "_save"])
def test_a_method_that_a_script_assigns_to_the_class_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As scripts patch a library that another script will use; a wrapper may have the names of what it wraps."""
    before, calls = getattr(Trainer, name), []

    @functools.wraps(before)
    def patched(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return before(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, name, patched)
    Trainer(Net(), arguments(tmp_path, save_strategy="steps", save_steps=4), train_dataset=rows(16)).train()
    assert calls


def test_and_one_that_would_never_be_called_is_refused_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_get_output_dir", lambda self, *args: "", raising=False)
    monkeypatch.setattr(Trainer, "_get_grad_norm", lambda self, *args: None, raising=False)
    with pytest.raises(ConfigError, match="_get_grad_norm='overridden'") as caught:
        Trainer(Net(), arguments(tmp_path), train_dataset=rows(8)).train()
    assert "_get_output_dir" in str(caught.value)


def test_a_copied_way_to_save_is_refused_before_the_run(tmp_path: Path) -> None:
    """As older scripts copied it from transformers: its first save would fail, maybe hours later."""

    class Mine(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            folder = str(tmp_path / f"checkpoint-{self.state.global_step}")
            self.save_model(folder, _internal_call=True)
            self._save_optimizer_and_scheduler(folder)
            self._save_rng_state(folder)

    trainer = Mine(Net(), arguments(tmp_path, save_strategy="steps", save_steps=2), train_dataset=rows(8))
    with pytest.raises(
        ConfigError, match="calls _save_optimizer_and_scheduler, _save_rng_state, which Windlass does"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_several_refusals_come_together(tmp_path: Path) -> None:
    kind = type("Mine", (Trainer,), {name: lambda self: None for name in ("_run_epoch", "_get_grad_norm")})
    with pytest.raises(ConfigError, match="2 problems"):
        kind(Net(), arguments(tmp_path), train_dataset=rows(8)).train()


class Table(nn.Module):
    """With gradients of an embedding that are not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.table(x.argmax(-1)).sum()}


def test_sparse_momentum_is_refused_before_a_run_that_saves(tmp_path: Path) -> None:
    """And not by its first save."""
    saving = arguments(tmp_path, optim="sgd", optim_args="momentum=0.9", save_strategy="steps", save_steps=2)
    trainer = Trainer(Table(), saving, train_dataset=rows(16))
    said = r"model.table.sparse=True: SGD with momentum=0.9 .*sparse=False, or set momentum to 0"
    with pytest.raises(ConfigError, match=said):
        trainer.train()
    assert trainer.state.global_step == 0


def test_an_optimizer_with_tensors_of_no_model_is_refused_before_a_run_that_saves(tmp_path: Path) -> None:
    for strategy in ("steps", "no"):
        model, latents = Net(), torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.SGD([*model.parameters(), latents], lr=0.1)
        args = arguments(tmp_path / strategy, save_strategy=strategy, save_steps=2)
        trainer = Trainer(model, args, train_dataset=rows(16), optimizers=(optimizer, None))
        if strategy == "no":
            trainer.train()
            continue
        with pytest.raises(
            ModelError, match=r"parameter 2 of group 0 \(shape \[2\]\) is not one of the model's"
        ):
            trainer.train()
        assert trainer.state.global_step == 0


def after_plain_updates() -> list[torch.Tensor]:
    """The weights after the same updates in a plain loop."""
    model, data = TwoLayers(), samples()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.5)
    for step in range(6):
        if step == 2:
            model.first.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.2})
        batch = data[4 * step : 4 * step + 4]
        x, labels = torch.stack([row["x"] for row in batch]), torch.tensor([row["labels"] for row in batch])
        model(x, labels)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().flatten() for p in model.parameters()]


@pytest.mark.parametrize("optim", ["sgd", "lomo"])
def test_gradients_of_an_unfrozen_layer_are_clipped_and_cleared_with_the_others(
    optim: str, tmp_path: Path
) -> None:
    for mine, wanted in zip(train(tmp_path, optim=optim), after_plain_updates(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


@pytest.mark.dist
def test_shards_train_an_unfrozen_layer_and_replicas_refuse_it(tmp_path: Path) -> None:
    for found in on_ranks(2, unfrozen_runs.main, tmp_path):
        for mine, wanted in zip(found["shards"], after_plain_updates(), strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), wanted, rtol=0, atol=1e-12)
        for kind in ("replicas", "in the backward"):
            assert (
                "parameters that were frozen when the run began, or were added since, require" in found[kind]
            )
