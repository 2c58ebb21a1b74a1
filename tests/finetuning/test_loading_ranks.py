"""One process of each machine reads the base of a sharded run, and sends it: what others read, and that the run is the
same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.finetuning import small
from tests.finetuning.preferences import pairs, settings

from windlass import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTTrainer,
)
from windlass.core.errors import ModelError
from windlass.dist.sharded import is_sharded, whole
from windlass.finetuning.base_model import load_model
from windlass.transforms.first_rank import has_weights

pytest.importorskip("transformers")
pytest.importorskip("peft")

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
# Options of the settings; and of the run: the trainer, the base, the adapter, and how a base is quantized when read.
CASES: dict[str, dict[str, Any]] = {
    "bf16 weights": {
        "model_init_kwargs": {"torch_dtype": "bfloat16", "device_map": None, "use_cache": False}
    },
    "packed, with an adapter": {"packing": True, "max_length": 32, "lora": LORA},
    "an adapter that begins with the weights": {"lora": {**LORA, "init_lora_weights": "pissa"}},
    "DPO": {"trainer": "DPO"},
    "DPO, its reference before": {"trainer": "DPO", "precompute_ref_log_probs": True},
    "KTO": {"trainer": "KTO", "lora": LORA},
    "reward": {"trainer": "Reward"},
    "reward, adapter": {"trainer": "Reward", "lora": LORA},
    "4 bits": {"bits": {}, "lora": LORA},
    "4 bits, DoRA": {"bits": {}, "lora": {**LORA, "use_dora": True}},
    "4 bits, scales too": {"bits": {"bnb_4bit_use_double_quant": True}, "lora": LORA, "trainer": "DPO"},
    "large": {"base": "large", "optim": "sgd"},
    "large, 4 bits": {"base": "large", "bits": {}, "lora": LORA},
    "stored in 4 bits": {"base": "packed", "lora": LORA, "bf16": True},
}
LARGE = ("large", "large, 4 bits")
SHORT = ("bf16 weights", "4 bits", "reward")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a base of which layers fill blocks of 4-bit numbers: in float32, and stored in 4 bits with scales
    that other options than those of a run made.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("bases")
    name = small.saved(folder / "whole", hidden_size=64, intermediate_size=128)
    form = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    packed = AutoModelForCausalLM.from_pretrained(name, quantization_config=form, dtype=torch.bfloat16)
    packed.save_pretrained(folder / "packed")
    small.tokenizer().save_pretrained(folder / "packed")
    small.saved(folder / "large", hidden_size=512, intermediate_size=2048, vocab_size=8192)
    return folder


def check(run: dict[str, Any], case: str, sizes: dict[str, int], reads: bool) -> None:
    each, first = run["each"], run["first"]
    size = sizes[CASES[case].get("base", "whole")]
    assert each["read"] >= size, "without it each process reads"
    assert first["read"] >= size if reads else first["read"] == 0, case
    assert first["empty"] is not reads, case
    assert first["sharded"], case
    assert "eval_on_start" in first["refused"], case
    for what in ("evaluated", "losses", "weights"):
        assert first[what] == each[what], f"{case}: the same bits"


@pytest.mark.dist
def test_one_process_reads_the_weights(bases: Path, tmp_path: Path) -> None:
    sizes = {folder.name: (folder / "model.safetensors").stat().st_size for folder in bases.iterdir()}
    cases = [case for case in CASES if case not in LARGE]
    first, second = on_ranks(2, main, bases, tmp_path, cases)
    for case in cases:
        check(first[case], case, sizes, reads=True)
        check(second[case], case, sizes, reads=False)
        assert first[case]["first"]["weights"] == second[case]["first"]["weights"]


@pytest.mark.slow
@pytest.mark.dist
def test_one_process_of_each_machine_reads_the_weights(bases: Path, tmp_path: Path) -> None:
    """Four processes that take themselves for two machines. The second has another embedding: rank 0's is trained."""
    sizes = {folder.name: (folder / "model.safetensors").stat().st_size for folder in bases.iterdir()}
    found = on_ranks(4, main, bases, tmp_path, SHORT)
    for case in SHORT:
        for rank, run in enumerate(found):
            check(run[case], case, sizes, reads=rank % 2 == 0)
        assert len({json.dumps(run[case]["first"]["weights"]) for run in found}) == 1


@pytest.mark.slow
@pytest.mark.dist
def test_other_processes_have_no_memory_for_the_base(bases: Path, tmp_path: Path) -> None:
    """The peak of resident memory while a trainer is made."""
    size = (bases / "large" / "model.safetensors").stat().st_size
    first, second = on_ranks(2, main, bases, tmp_path, LARGE)
    for case in LARGE:
        each, sent = second[case]["each"], second[case]["first"]
        assert sent["made_with"] < size / 8, case
        # Memory that was freed before is taken first: it does not add to the peak.
        assert each["made_with"] - sent["made_with"] > size * (0.5 if case == "large" else 0.1), case
        assert first[case]["first"]["made_with"] > sent["made_with"]


def test_a_model_without_weights_has_the_config_of_one_with_them(tmp_path: Path) -> None:
    name = small.saved(tmp_path / "base", hidden_size=64, intermediate_size=96)
    of_config = {"attention_dropout": 0.5, "use_cache": False}
    for options in (
        {"dtype": "auto", "device_map": None, "local_files_only": True, **of_config},
        {
            "dtype": torch.bfloat16,
            "attn_implementation": "eager",
            "device_map": "cpu",
            "use_safetensors": True,
        },
    ):
        empty, read = load_model(name, options, empty=True), load_model(name, options)
        assert not has_weights(empty)
        assert has_weights(read)
        assert str(empty.config) == str(read.config)
        assert str(empty.generation_config) == str(read.generation_config)
        assert empty.training == read.training
        shapes = [{n: (p.shape, p.dtype) for n, p in each.named_parameters()} for each in (empty, read)]
        assert shapes[0] == shapes[1]
    changed = load_model(name, {"dtype": "auto", "adapter_kwargs": {}}, empty=True)
    assert has_weights(changed), "what may need weights is left to from_pretrained"
    file = tmp_path / "base" / "config.json"
    file.write_text(
        json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "architectures"})
    )
    assert type(load_model(name, {"dtype": "auto"}, empty=True)) is type(changed)


# --- what each rank runs ----------------------------------------------------------------------------------------------


class Reads:
    """Counts the bytes of weights that `safetensors` gives to this process."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> Reads:
        import safetensors
        from transformers import modeling_utils

        counted, reads = safetensors.safe_open, self

        class Counted:
            def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
                self._file = counted(path, *args, **kwargs)
                if str(path).endswith("model.safetensors"):
                    reads.bytes += os.path.getsize(path)

            def __enter__(self) -> Any:
                return self._file.__enter__()

            def __exit__(self, *args: Any) -> Any:
                return self._file.__exit__(*args)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._file, name)

        self._was, modeling_utils.safe_open = modeling_utils.safe_open, Counted
        return self

    def __exit__(self, *args: Any) -> None:
        from transformers import modeling_utils

        modeling_utils.safe_open = self._was


def trainer_of(kind: str, base: str, folder: Path, form: Any, adapter: Any, options: dict[str, Any]) -> Any:
    options = {"per_device_train_batch_size": 2, "max_steps": 2, "fsdp": "full_shard", **options}
    others = {"quantization_config": form, "peft_config": adapter, "eval_dataset": held(kind)}
    if kind == "SFT":
        rows = small.table(small.texts(16))
        return SFTTrainer(base, small.arguments(folder, **options), train_dataset=rows, **others)
    own = {
        "DPO": (DPOTrainer, DPOConfig),
        "KTO": (KTOTrainer, KTOConfig),
        "Reward": (RewardTrainer, RewardConfig),
    }
    trainer, config = own[kind]
    return trainer(
        base, args=settings(folder, config, **options), train_dataset=small.table(pairs(16)), **others
    )  # fmt: skip


def held(kind: str) -> Any:
    return small.table(small.texts(3) if kind == "SFT" else pairs(3))


def resident(which: str) -> int:
    """Bytes of this process: now (VmRSS), or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def run(
    bases: Path,
    folder: Path,
    first: bool,
    trainer: str = "SFT",
    base: str = "whole",
    bits: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    import peft
    from transformers import BitsAndBytesConfig

    task = "SEQ_CLS" if trainer == "Reward" else "CAUSAL_LM"
    adapter = None if lora is None else peft.LoraConfig(task_type=task, **lora)
    form = None
    if bits is not None:
        packed = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.float32}
        form = BitsAndBytesConfig(load_in_4bit=True, **packed, **bits)
    options["fsdp_config"] = {
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "cpu_ram_efficient_loading": first,
    }  # fmt: skip
    os.environ["WINDLASS_HOME"] = str(folder / "home")  # what one run computed is not kept for the next
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    with Reads() as reads:
        made = trainer_of(trainer, str(bases / base), folder, form, adapter, options)
    made_with = resident("VmHWM") - before
    own = [p for n, p in made.model.named_parameters() if "lora_" not in n and "score" not in n]
    empty, refused = all(p.is_meta for p in own), ""
    if first:
        try:
            made.evaluate()
        except ModelError as error:
            refused = str(error)
    made.train()
    named = dict(made.model.named_parameters())
    return {
        "made_with": made_with,
        "read": reads.bytes,
        "empty": empty,
        "refused": refused,
        "evaluated": made.evaluate()["eval_loss"],
        "sharded": all(is_sharded(p) for p in named.values()),
        "losses": [row["loss"] for row in made.state.log_history if "loss" in row],
        "weights": {n: whole(p.detach()).to(torch.float32).flatten()[:50].tolist() for n, p in named.items()},
    }


def read_another_embedding() -> None:
    import transformers

    own = transformers.PreTrainedModel.from_pretrained.__func__

    def other(*args: Any, **kwargs: Any) -> Any:
        model = own(*args, **kwargs)
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(1)
        return model

    transformers.PreTrainedModel.from_pretrained = classmethod(other)  # type: ignore[assignment]


def main(bases: Path, folder: Path, cases: Iterable[str]) -> dict[str, Any]:
    rank, machine = int(os.environ["RANK"]), 2  # processes of a machine
    os.environ.update(LOCAL_RANK=str(rank % machine), LOCAL_WORLD_SIZE=str(machine))
    if rank >= machine:
        read_another_embedding()
    return {
        case: {
            word: run(bases, folder / f"{case}-{word}", word == "first", **CASES[case])
            for word in ("each", "first")
        }
        for case in cases
    }
