"""Convert the values of arguments to one form, in place. Wrong values are left for `validate` to report."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from windlass.config import accelerator_config
from windlass.config.enums import METRIC_DRIVEN, DebugOption
from windlass.config.json_document import read_document
from windlass.config.kinds import as_declared
from windlass.config.renamed import TWINS
from windlass.config.sections.fields import Fields
from windlass.config.sections.setting import STRIDE, Rules, rules_of
from windlass.config.values import hints, members
from windlass.core.errors import ConfigError
from windlass.core.logs import get_verbosity

DEFAULT_OUTPUT_DIR = "trainer_output"


def normalise(args: Fields) -> None:
    """Normalise `args`. May be called again after any assignment, and then derives values again."""
    values = args.__dict__
    for name, said in values.get("_derived", {}).items():
        values[name] = said
    values["_derived"] = {}
    _paths(values)
    rules = rules_of(type(args))
    _documents(values, rules, getattr(type(args), "_VALID_DICT_FIELDS", ()))
    _words(values)
    for name, hint in hints(type(args)).items():
        values[name] = as_declared(values[name], members(hint))
    _strides(values, rules)
    _lists(values)
    _twins(values)
    _derive(args)


def _paths(values: dict[str, Any]) -> None:
    for name in ("output_dir", "resume_from_checkpoint"):
        if isinstance(values[name], os.PathLike):
            values[name] = os.fspath(values[name])
    if values["output_dir"] is None:
        values["output_dir"] = DEFAULT_OUTPUT_DIR
    if isinstance(values["output_dir"], str):
        values["output_dir"] = os.path.expanduser(values["output_dir"])
    if values["hub_token"] == "<HUB_TOKEN>":
        # From written arguments, which have a placeholder instead of the secret.
        values["hub_token"] = None


def _documents(values: dict[str, Any], rules: Mapping[str, Rules], declared: Iterable[str]) -> None:
    documents = [name for name, rule in rules.items() if rule.document]
    # Fields of a script's subclass; their text is taken for JSON only if it looks so.
    documents += [name for name in declared if name not in rules and str(values.get(name)).startswith("{")]
    for name in documents:
        if isinstance(values[name], os.PathLike):
            values[name] = os.fspath(values[name])
        if not isinstance(values[name], str) or not values[name]:
            continue
        try:
            values[name] = read_document(values[name])
        except ValueError:
            continue  # `validate` gives the reason
    try:
        values["accelerator_config"] = accelerator_config.read(values["accelerator_config"])
    except ConfigError:
        return  # `validate` gives the reason


def _words(values: dict[str, Any]) -> None:
    if isinstance(values["include_num_input_tokens_seen"], bool):
        values["include_num_input_tokens_seen"] = "all" if values["include_num_input_tokens_seen"] else "no"
    if isinstance(values["debug"], str):
        values["debug"] = values["debug"].split()
    elif values["debug"] is None:
        values["debug"] = []
    if isinstance(values["debug"], list):
        known = {option.value: option for option in DebugOption}
        values["debug"] = [known.get(str(option), option) for option in values["debug"]]


def _strides(values: dict[str, Any], rules: Mapping[str, Rules]) -> None:
    for name in (name for name, rule in rules.items() if rule.bounds is STRIDE):
        value = values[name]
        if isinstance(value, float) and value > 1 and value.is_integer():
            values[name] = int(value)
    limit = values["save_total_limit"]
    if isinstance(limit, int) and limit <= 0:
        values["save_total_limit"] = None


def _lists(values: dict[str, Any]) -> None:
    report_to = values["report_to"]
    if report_to in (None, "none", ["none"], "", []):
        values["report_to"] = []
    elif isinstance(report_to, str):
        values["report_to"] = [report_to]
    for name in ("include_for_metrics", "label_names"):
        if isinstance(values[name], str):
            values[name] = [values[name]]
        elif isinstance(values[name], tuple):
            values[name] = list(values[name])


def _twins(values: dict[str, Any]) -> None:
    for old, new in TWINS.items():
        if values[new] is None:
            values[new] = values[old]
        values[old] = values[new]
    if values["activation_checkpointing"] is None:
        values["activation_checkpointing"] = values["gradient_checkpointing"] = False


def _derive(args: Fields) -> None:
    """Set fields that follow from others, and keep their given values so that they can be derived again."""
    values = args.__dict__

    def follow(name: str, value: Any) -> None:
        if values[name] != value:
            values["_derived"][name] = values[name]
            values[name] = value

    if values["eval_strategy"] == "steps" and not values["eval_steps"]:
        follow("eval_steps", values["logging_steps"])
    if values["eval_strategy"] != "no" and values["do_eval"] is False:
        follow("do_eval", True)
    wants_metric = (
        values["load_best_model_at_end"]
        or values["keep_best"] is not None
        or values["lr_scheduler_type"] in METRIC_DRIVEN
    )
    if values["metric_for_best_model"] is None and wants_metric:
        follow("metric_for_best_model", "loss")
    if values["greater_is_better"] is None and isinstance(values["metric_for_best_model"], str):
        follow("greater_is_better", not values["metric_for_best_model"].endswith("loss"))
    if values["disable_tqdm"] is None:
        follow("disable_tqdm", get_verbosity() > logging.WARNING)
    if values["use_cpu"] is True:
        follow("dataloader_pin_memory", False)
    _derive_compile(values, follow)
    config = values["accelerator_config"]
    if (
        isinstance(config, accelerator_config.AcceleratorConfig)
        and values["gradient_accumulation_steps"] == 1
    ):
        follow("gradient_accumulation_steps", config.num_steps or 1)


def _derive_compile(values: dict[str, Any], follow: Any) -> None:
    if (
        values["torch_compile_backend"] is not None
        or values["torch_compile_mode"] is not None
        or values["torch_compile_blocks"] is True
    ):
        follow("torch_compile", True)
    if values["torch_compile"] is True and values["torch_compile_backend"] is None:
        follow("torch_compile_backend", "inductor")
