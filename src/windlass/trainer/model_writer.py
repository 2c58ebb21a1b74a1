"""The files of a model: its weights, and what they need beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, Adapter, find_adapter
from windlass.checkpoint.opening import upload_files
from windlass.checkpoint.weights import WEIGHTS_NAME, save_weights
from windlass.core.locations import local_folder
from windlass.core.module_state import bare, state_of, with_copied_buffers
from windlass.dist.gang import Gang
from windlass.transforms.alone import Alone
from windlass.transforms.strategy import Strategy


class ModelWriter:
    """Writes a model so that `from_pretrained` reads it; only the adapter if that is all that is trained.

    Attributes:
        model, strategy: the bare model, and how it is spread over ranks.

    Args:
        strategy: None: one process has it alone.
        tokenizer: returns the tokenizer or processor that is saved with it, or None.
        arguments: returns the run's arguments as plain data, for the reader.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy | None,
        tokenizer: Callable[[], Any],
        arguments: Callable[[], Any],
    ) -> None:
        self.model, self.strategy = model, strategy or Alone(model)
        self._tokenizer, self._arguments = tokenizer, arguments
        self._adapter: tuple[list[int], Adapter | None] | None = None

    @property
    def tokenizer(self) -> Any:
        """What is saved with the model; None if it cannot be."""
        tokenizer = self._tokenizer()
        return tokenizer if hasattr(tokenizer, "save_pretrained") else None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is all this model trains; None if it trains other weights."""
        trained = [id(p) for p in self.model.parameters() if p.requires_grad]
        if self._adapter is None or self._adapter[0] != trained:
            # peft may look a configuration up over the network, so it is not asked at every save.
            self._adapter = trained, find_adapter(self.model)
        return self._adapter[1]

    def gathered(self) -> Mapping[str, Any] | None:
        """Whole tensors (on the main process) if ranks hold parts of them; None if the model has them itself.
        Collective.
        """
        if not self.strategy.sharded:
            return None
        adapter = self.adapter
        return self.strategy.whole_state() if adapter is None else adapter.gathered()

    def of_first_rank(self, nodes: int) -> Mapping[str, Any]:
        """The model's state dict, in which buffers (running statistics differ between ranks) are rank 0's on each rank
        that writes a copy. Collective if there are several.

        Args:
            nodes: disks to which a copy is written.
        """
        if nodes == 1:
            return state_of(self.model)
        with self.strategy.buffers_of_first_rank():
            return with_copied_buffers(self.model)

    def named(self, state: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """The name of the weights' file and what it holds, of a state dict."""
        adapter = self.adapter
        if adapter is None or not adapter.names.keys() <= state.keys():
            return WEIGHTS_NAME, state
        return ADAPTER_WEIGHTS, adapter.weights(state)

    def write(self, folder: Path, state: Mapping[str, Any] | None = None) -> None:
        """Write everything into a folder, which is made.

        Args:
            state: the weights to write instead of the model's own; an empty one writes none.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights = dict(bare(self.model).state_dict()) if state is None else state
        if weights:
            name, tensors = self.named(weights)
            save_weights(folder, tensors, name=name)
        self.write_small(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(folder))

    def write_small(self, folder: Path) -> None:
        """Write configurations, and the run's arguments."""
        adapter = self.adapter
        if adapter is not None:
            adapter.save_config(folder)  # the base has its configuration where it came from
        else:
            for name in ("config", "generation_config"):
                part: Any = getattr(self.model, name, None)
                if hasattr(part, "save_pretrained"):
                    _declare_architecture(part, self.model)
                    part.save_pretrained(str(folder))
        arguments = json.dumps(self._arguments(), indent=2, sort_keys=True, default=str)
        (folder / "training_args.json").write_text(arguments + "\n", encoding="utf-8")


def save_final(place: str, files: ModelWriter, save: Callable[..., None], gang: Gang, writes: bool) -> None:
    """Write a model to a folder or a URL. Collective.

    Args:
        save: `Trainer._save`: writes it into a folder, of gathered weights if there are some.
        writes: this rank writes.
    """
    state = files.gathered()
    try:
        if writes:
            folder = str(local_folder(place))
            # Overrides that know of no sharding take the folder alone.
            save(folder) if state is None else save(folder, state_dict=state)
        if gang.rank == 0:
            upload_files(place)
    finally:
        gang.barrier()


def _declare_architecture(config: Any, model: nn.Module) -> None:
    """`AutoModel.from_pretrained` finds the class by the configuration's `architectures`."""
    if getattr(config, "architectures", False) is None:
        config.architectures = [type(model).__name__]
