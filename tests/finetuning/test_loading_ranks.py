"""One process reads the base of a sharded run, and sends it: what others read, and that the run is the same."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch
from tests.finetuning import small

from windlass import SFTTrainer
from windlass.core.errors import ModelError
from windlass.dist.sharded import is_sharded, whole
from windlass.finetuning.base_model import load_model
from windlass.transforms.first_rank import has_weights

pytest.importorskip("transformers")
pytest.importorskip("peft")

CASES: dict[str, dict[str, Any]] = {
    "bf16 weights": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "packed, with an adapter": {"packing": True, "max_length": 32, "lora": True},
}


@pytest.mark.dist
def test_one_process_reads_the_weights(tmp_path: Path) -> None:
    name = small.saved(tmp_path / "base", hidden_size=64, intermediate_size=96)
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    launch(2, Path(__file__), name, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for case in CASES:
        one, other = first[case], second[case]
        assert one["each"]["read"] >= size
        assert other["each"]["read"] >= size, "without it each process reads"
        assert one["first"]["read"] >= size
        assert other["first"]["read"] < size / 10, case
        assert other["first"]["sharded"]
        for run in (one, other):
            assert "eval_on_start" in run["first"]["refused"]
            assert run["first"]["evaluated"] == run["each"]["evaluated"]
            assert run["first"]["losses"] == run["each"]["losses"]
            assert run["first"]["weights"] == run["each"]["weights"], f"{case}: the same bits"
        assert one["first"]["weights"] == other["first"]["weights"]


def test_a_model_without_weights_has_the_config_of_one_with_them(tmp_path: Path) -> None:
    name = small.saved(tmp_path / "base", hidden_size=64, intermediate_size=96)
    for options in ({"dtype": "auto"}, {"dtype": torch.bfloat16, "attn_implementation": "eager"}):
        empty, read = load_model(name, options, empty=True), load_model(name, options)
        assert not has_weights(empty)
        assert has_weights(read)
        assert str(empty.config) == str(read.config)
        assert str(empty.generation_config) == str(read.generation_config)
        assert empty.training == read.training
        shapes = [{n: (p.shape, p.dtype) for n, p in each.named_parameters()} for each in (empty, read)]
        assert shapes[0] == shapes[1]
    changed = load_model(name, {"dtype": "auto", "attention_dropout": 0.5}, empty=True)
    assert has_weights(changed), "an option that may be of the config is left to from_pretrained"
    assert changed.config.to_dict()["attention_dropout"] == 0.5  # type: ignore[operator, union-attr]
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


def run(base: str, folder: Path, first: bool, lora: bool = False, **changes: Any) -> dict[str, Any]:
    import peft

    adapter = (
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    )
    sharding = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "cpu_ram_efficient_loading": first}
    with Reads() as reads:
        trainer = SFTTrainer(
            base,
            small.arguments(
                folder, per_device_train_batch_size=2, fsdp="full_shard", fsdp_config=sharding, **changes
            ),
            train_dataset=small.table(small.texts(16)),
            peft_config=adapter,
        )
    refused = ""
    if first:
        try:
            trainer.evaluate(small.table(small.texts(3)))
        except ModelError as error:
            refused = str(error)
    trainer.train()
    named = dict(trainer.model.named_parameters())
    return {
        "read": reads.bytes,
        "refused": refused,
        "evaluated": trainer.evaluate(small.table(small.texts(3)))["eval_loss"],
        "sharded": all(is_sharded(p) for p in named.values()),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "weights": {n: whole(p.detach()).to(torch.float32).flatten()[:50].tolist() for n, p in named.items()},
    }


def main() -> None:
    base, folder = sys.argv[1], Path(sys.argv[2])
    found = {
        case: {
            word: run(base, folder / f"{case}-{word}", word == "first", **options)
            for word in ("each", "first")
        }
        for case, options in CASES.items()
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
