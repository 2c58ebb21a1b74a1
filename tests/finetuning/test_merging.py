"""An adapter is added to its base: the merged model computes what base and adapter computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.preferences import pairs, settings
from tests.finetuning.test_peft_adapters import ids, lora, quantized
from tests.finetuning.vision_families import family

from windlass import SFTTrainer
from windlass.checkpoint.files import Files
from windlass.cli.main import main
from windlass.core.errors import CheckpointError
from windlass.finetuning.merging import base_of, merge_adapter
from windlass.finetuning.reward_config import RewardConfig
from windlass.finetuning.reward_trainer import RewardTrainer
from windlass.finetuning.trained_model import open_trained

peft = pytest.importorskip("peft")


def trained(folder: Path, base: str, **options: Any) -> Any:
    trainer = SFTTrainer(
        base, small.arguments(folder, max_steps=5), train_dataset=small.table(small.texts()),
        **{"peft_config": lora(), **options},
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer.model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids()).logits


def test_a_merged_model_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose base was a relative path, merged in another working directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    model = trained(tmp_path / "run", Path(small.saved(tmp_path / "base")).name)
    monkeypatch.chdir(tmp_path / "run")
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(logits(merged), logits(model), atol=1e-6)
    assert not torch.allclose(logits(merged), logits(small.model().eval()), atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<eos>"
    merge_adapter(tmp_path / "run", tmp_path / "halves", dtype=torch.bfloat16)
    halves = AutoModelForCausalLM.from_pretrained(tmp_path / "halves").state_dict()
    assert all(torch.equal(halves[name], value.bfloat16()) for name, value in merged.state_dict().items())
    words = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "parts"), "--merge"]
    assert main([*words, "--max-shard-size", "10KB"]) == 0
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    assert main([*words, "--force"]) == 2
    with pytest.raises(CheckpointError, match="there already"):
        merge_adapter(tmp_path / "run", tmp_path / "merged")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="name a new folder"):
        merge_adapter(Path("../run"), Path())
    merge_adapter(Path("../run"), Path("merged"))
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["merged"]


def test_an_adapter_that_is_saved_in_another_working_directory_names_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small.saved(tmp_path / "base")
    trainer = SFTTrainer(
        "base", small.arguments(tmp_path / "run", max_steps=1), train_dataset=small.table(small.texts()),
        peft_config=lora(),
    )  # fmt: skip
    (tmp_path / "elsewhere" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.train()
    trainer.save_model()
    assert base_of(tmp_path / "run") == str(tmp_path / "base")
    merge_adapter(tmp_path / "run", tmp_path / "merged")


def test_an_adapter_is_put_on_the_revision_that_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--me--small"
    (stored / "refs").mkdir(parents=True)
    for seed, branch in enumerate(("main", "other")):
        (stored / "refs" / branch).write_text(branch)
        small.saved(stored / "snapshots" / branch, seed=seed)
    config = lora()
    for branch in ({"revision": "other"}, {}):
        trainer = SFTTrainer(
            "me/small", small.arguments(tmp_path / "run", model_init_kwargs=branch),
            train_dataset=small.table(small.texts()), peft_config=config,
        )  # fmt: skip
        trainer.save_model()
        [model, _] = open_trained(str(tmp_path / "run"), None, "auto")
        assert torch.allclose(logits(model), logits(trainer.model.eval()), atol=1e-6)


def test_few_bits_are_merged_in_the_precision_of_the_base(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    name, four_bits, _ = quantized(tmp_path / "base")
    trained(tmp_path / "run", name, quantization_config=four_bits)
    merge_adapter(tmp_path / "run", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    whole = AutoModelForCausalLM.from_pretrained(name)
    expected = peft.PeftModel.from_pretrained(whole, str(tmp_path / "run")).eval()
    assert torch.allclose(logits(merged), logits(expected), atol=1e-6)
    untouched = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(merged.get_parameter(untouched), whole.get_parameter(untouched))


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_a_reward_model_keeps_its_head(tmp_path: Path, task: str | None) -> None:
    from transformers import AutoModelForSequenceClassification

    trainer = RewardTrainer(
        small.saved(tmp_path / "base"), settings(tmp_path / "run", RewardConfig), train_dataset=pairs(8),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    merge_adapter(tmp_path / "run", tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(logits(merged), logits(trainer.model.eval()), atol=1e-6)


def test_a_model_that_sees_images_keeps_its_processor(tmp_path: Path) -> None:
    from transformers import AutoProcessor

    model, processor = family("llava")
    for part in (model, processor):
        part.save_pretrained(tmp_path / "base")
    peft.get_peft_model(model, lora()).save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", str(tmp_path / "base"))
    assert AutoProcessor.from_pretrained(tmp_path / "merged").image_token == processor.image_token


@pytest.mark.parametrize("tied", [False, True])
def test_added_tokens_are_saved_and_merged(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    source, new = small.tokenizer(), ["<turn>", "<end>"]
    source.add_special_tokens({"additional_special_tokens": new})
    source.save_pretrained(tmp_path / "template")
    base = small.saved(tmp_path / "base", tie_word_embeddings=tied)
    trainer = SFTTrainer(
        base, small.arguments(tmp_path / "run", chat_template_path=str(tmp_path / "template")),
        train_dataset=small.table(small.chats()), peft_config=lora(),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    rows = torch.tensor([[7, 8, *trainer.processing_class.convert_tokens_to_ids(new)]])
    expected = trainer.model.eval()(rows).logits
    opened, _ = open_trained(str(tmp_path / "run"), None, "float32", torch.device("cpu"))
    assert torch.equal(opened(rows).logits, expected)
    merge_adapter(tmp_path / "run", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(rows).logits, expected, atol=1e-6)


def test_an_adapter_of_a_tied_embedding_changes_the_embedding_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = small.saved(tmp_path / "base", tie_word_embeddings=True)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])
    model = trained(tmp_path / "run", base, peft_config=adapter)
    merge_adapter(tmp_path / "run", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(logits(merged), logits(model), atol=1e-6)


def test_a_merge_that_was_killed_is_done_again(tmp_path: Path) -> None:
    trained(tmp_path / "run", small.saved(tmp_path / "base"))
    (tmp_path / "tmp-unfinished-merged").mkdir()
    (tmp_path / "tmp-unfinished-merged" / "model.safetensors").write_text("half")
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]
    assert main([*command, "--max-shard-size", "4KB"]) == 0
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    assert not (tmp_path / "tmp-unfinished-merged").exists()


def test_all_of_a_merge_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of templates included, and the name itself before the command says that it is done."""
    done: list[tuple[str, Path]] = []
    monkeypatch.setattr(Files, "before", lambda self, operation, path: done.append((operation, path)))
    trained(tmp_path / "run", small.saved(tmp_path / "base"))
    tokenizer = small.tokenizer()
    tokenizer.chat_template = {"default": small.CHAT, "tools": small.CHAT}
    tokenizer.save_pretrained(tmp_path / "run")
    done.clear()
    merge_adapter(tmp_path / "run", tmp_path / "merged")
    renamed = done.index(("rename", tmp_path / "tmp-unfinished-merged"))
    files = [path.relative_to(tmp_path / "merged") for path in (tmp_path / "merged").rglob("*")]
    assert Path("additional_chat_templates/tools.jinja") in files
    assert {tmp_path / "tmp-unfinished-merged" / path for path in files} < {
        path for _, path in done[:renamed]
    }
    assert ("fsync", tmp_path / "tmp-unfinished-merged/additional_chat_templates/tools.jinja") in done[
        :renamed
    ]
    assert ("fsync_folder", tmp_path) in done[renamed:]


def test_what_has_no_place_in_the_base(tmp_path: Path) -> None:
    from transformers import LlamaForTokenClassification

    base = small.saved(tmp_path / "base")
    tagger = LlamaForTokenClassification.from_pretrained(base, num_labels=3)
    adapter = peft.LoraConfig(task_type="TOKEN_CLS", r=2, target_modules=["q_proj"])
    peft.get_peft_model(tagger, adapter).save_pretrained(tmp_path / "tagger")
    with pytest.raises(CheckpointError, match=r"a LlamaForCausalLM has no place for: .*score"):
        merge_adapter(tmp_path / "tagger", tmp_path / "new")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(small.model(), prompt).save_pretrained(tmp_path / "prompt")
    with pytest.raises(CheckpointError, match=r"learnt \(PROMPT_TUNING\)"):
        merge_adapter(tmp_path / "prompt", tmp_path / "new", base)
    for options, reason in (
        ({"lora_bias": True}, "has no bias"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "several"),
    ):
        peft.get_peft_model(small.model(), lora(**options)).save_pretrained(tmp_path / reason)
        with pytest.raises(CheckpointError, match=reason):
            merge_adapter(tmp_path / reason, tmp_path / "new", base)
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="holds no adapter"):
        merge_adapter(tmp_path, tmp_path / "new")
    assert (
        main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.safetensors"), "--merge", "--base=b"])
        == 2
    )
    assert "name a folder as TARGET" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "new"), "--base=b"]) == 2
    assert "add --merge" in capsys.readouterr().err
