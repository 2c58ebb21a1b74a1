"""`push_to_hub()` and `save_model()` of a Trainer that publishes."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from tests.hub.server import Hub
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.core.errors import CheckpointError


def test_the_final_model_with_its_card(hub: Hub, token: str, tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path / "mine", hub_token=token), train_dataset=rows(8))
    address = trainer.push_to_hub("Done", tags=["small"])
    found = hub.files("someone/mine")
    assert set(found) == {"model.safetensors", "README.md"}
    assert address.startswith(f"{hub.url}/someone/mine/commit/")
    assert hub.repositories["someone/mine"].messages[-1] == "Done"
    assert b"# mine" in found["README.md"]
    later = trainer.push_to_hub(blocking=False)
    assert isinstance(later, Future)
    assert later.result(60).startswith(hub.url)


def test_only_plain_files_of_the_model_are_published(hub: Hub, token: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    trainer = Trainer(Net(), arguments(folder, hub_token=token), train_dataset=rows(8))
    trainer.save_model()
    modules = {
        "modeling_net.py": "from .parts import Part\nfrom os import path",
        "parts.py": "from .deep.er import x",
        "tokenization_net.py": "",
        "settings.py": "KEY = 'secret'",
        "train.py": "import settings",
    }
    for name, text in modules.items():
        (folder / name).write_text(text)
    maps = {
        "config.json": {"AutoModel": "modeling_net.Net", "AutoConfig": "other/repository--settings.Config"},
        "tokenizer_config.json": {"AutoTokenizer": ["tokenization_net.Slow", None]},
    }
    for name, found in maps.items():
        (folder / name).write_text(json.dumps({"auto_map": found}))
    trainer.push_to_hub()
    code = {"modeling_net.py", "parts.py", "tokenization_net.py"}
    assert set(hub.files("someone/mine")) == {"model.safetensors", "README.md", *maps, *code}
    secret = tmp_path / "secret.txt"
    secret.write_text("precious")
    (folder / "my.model").symlink_to(secret)
    with pytest.raises(
        CheckpointError, match=r"my\.model is a symbolic link; only plain files are published"
    ):
        trainer.push_to_hub()
    assert set(hub.files("someone/mine")) == {"model.safetensors", "README.md", *maps, *code}


def test_an_adapter_is_published_without_whole_weights_of_an_earlier_run(
    hub: Hub, token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peft = pytest.importorskip("peft")
    trainer = Trainer(Net(), arguments(tmp_path / "mine", hub_token=token), train_dataset=rows(8))
    trainer.save_model()
    assert "earlier save" not in caplog.text
    lines = [name for name, part in Net().named_modules() if isinstance(part, torch.nn.Linear)]
    tuned = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=lines))
    Trainer(tuned, trainer.args, train_dataset=rows(8)).push_to_hub()
    assert "has model.safetensors of an earlier save beside adapter_model.safetensors" in caplog.text
    names = {"adapter_model.safetensors", "adapter_config.json", "README.md"}
    assert set(hub.files("someone/mine")) == names


def test_another_branch(hub: Hub, token: str, tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path / "mine"), train_dataset=rows(8))
    trainer.push_to_hub(token=token, revision="other")
    assert "model.safetensors" in hub.files("someone/mine", "other")
    assert hub.files("someone/mine") == {}


def test_save_model_publishes_if_the_run_does(hub: Hub, token: str, tmp_path: Path) -> None:
    settings = {"push_to_hub": True, "hub_token": token, "hub_strategy": "end", "save_strategy": "no"}
    trainer = Trainer(Net(), arguments(tmp_path / "mine", **settings), train_dataset=rows(8))
    trainer.init_hf_repo()
    assert hub.files("someone/mine") == {}
    trainer.save_model()
    trainer.train()  # waits for the upload at its end
    assert set(hub.files("someone/mine")) == {"model.safetensors"}


def test_the_card_takes_the_licence_of_the_base_from_the_hub(hub: Hub, token: str, tmp_path: Path) -> None:
    base = hub.create("other/base")
    card = {"path": "README.md", "content": "LS0tCmxpY2Vuc2U6IG1pdAotLS0KQmFzZQo="}  # "license: mit"
    hub.commit(base, "main", [{"key": "header", "value": {"summary": ""}}, {"key": "file", "value": card}])
    trainer = Trainer(Net(), arguments(tmp_path / "mine", hub_token=token), train_dataset=rows(8))
    trainer.push_to_hub(finetuned_from="other/base")
    assert b"license: mit\nbase_model: other/base\n" in hub.files("someone/mine")["README.md"]
    (tmp_path / "mine/README.md").unlink()
    trainer.push_to_hub(finetuned_from="other/absent")
    assert b"license" not in hub.files("someone/mine")["README.md"]
