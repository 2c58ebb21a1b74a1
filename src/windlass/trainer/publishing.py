"""What is done with a trained model: its card, and what waits for a hub or for a search."""

from __future__ import annotations

from typing import Any, NoReturn

from windlass.config.support import SECTIONS
from windlass.core.errors import ConfigError, Problem
from windlass.trainer.base import TrainerBase
from windlass.trainer.card import ModelCard, write_card


class PublishingMixin(TrainerBase):
    """`create_model_card`, and the methods of PARITY that are refused by name."""

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write a draft of the model's card, `README.md` in the output folder, on the main process.

        The arguments are facts that the run does not know itself; what it knows (settings, evaluations, sizes) is
        filled in. Tags of a card that is there already are kept.
        """
        if not self.is_world_process_zero():
            return
        config = getattr(self.model, "config", None)
        card = ModelCard(
            name=model_name or self.output_folder.absolute().name,
            model_class=type(self.model).__name__,
            parameters=sum(p.numel() for p in self.model.parameters()),
            base=finetuned_from or getattr(config, "_name_or_path", None) or None,
            facts={
                "language": _listed(language),
                "license": _listed(license),
                "tags": _listed(tags),
                "pipeline_tag": _listed(tasks),
                "datasets": _listed(dataset_tags),
            },
            dataset=_listed(dataset),
            dataset_args=_listed(dataset_args),
            settings=self.args.to_dict(),
            world=self._gang.size,
            history=self.state.log_history,
            steps=self.state.global_step,
            epochs=self.state.epoch,
        )
        write_card(self.output_folder / "README.md", card)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> NoReturn:
        """Not built yet.

        Raises:
            ConfigError: always, with what to do instead.
        """
        _refuse("init_hf_repo")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> NoReturn:
        """Not built yet.

        Raises:
            ConfigError: always, with what to do instead.
        """
        _refuse("push_to_hub")

    def hyperparameter_search(
        self,
        hp_space: Any = None,
        compute_objective: Any = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Any = None,
        **kwargs: Any,
    ) -> NoReturn:
        """Not built yet.

        Raises:
            ConfigError: always, with what to do instead.
        """
        _refuse("hyperparameter_search")


def _refuse(name: str) -> NoReturn:
    raise ConfigError(Problem(f"Trainer.{name}", "called", SECTIONS["Trainer methods"][name].note))


def _listed(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
