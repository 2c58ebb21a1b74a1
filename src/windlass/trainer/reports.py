"""What a run says: logs, metrics, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.checkpoint.strict_json import MAX_JSON_BYTES
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.metric_values import plain_metrics
from windlass.core.output import say
from windlass.metrics.memory import memory_metrics, reset_device_peak
from windlass.metrics.speed import speed_metrics
from windlass.trainer.base import TrainerBase

logger = get_logger(__name__)


class ReportsMixin(TrainerBase):
    """`log` and the `*_metrics` helpers of the guides' scripts."""

    _initial_tokens_seen = 0

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add `logs` to the history and tell the callbacks. Override it to add values of your own.

        Args:
            logs: names and values; `epoch` is added, and the token count where `include_num_input_tokens_seen` asks
                for it.
            start_time: when training began, in seconds; gives tokens per second.
        """
        # The history goes into checkpoints, and callbacks write it: both hold plain data alone.
        plain = plain_metrics(logs)
        logs.clear()
        logs.update(plain)
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self._initial_tokens_seen
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.fire("on_log", self.args, self.state, self.control, logs=logs)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics of one split ("train", "eval", ...) as aligned lines, on the main process."""
        if not self.is_world_process_zero():
            return
        shown = self.metrics_format(metrics)
        width = max((len(str(name)) for name in shown), default=0)
        say(f"***** {split} metrics *****")
        for name in sorted(shown):
            say(f"  {name:<{width}} = {shown[name]}")

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Metrics for people: times as h:m:s, memory in MB, FLOPs in GF, other floats with four digits."""
        return {name: _readable(name, value) for name, value in metrics.items()}

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write `{split}_results.json` into the output folder, and merge into `all_results.json` (`combined`)."""
        if not self.is_world_process_zero():
            return
        folder = self.output_folder
        folder.mkdir(parents=True, exist_ok=True)
        metrics = plain_metrics(metrics)
        _write_json(folder / f"{split}_results.json", metrics)
        if combined:
            path = folder / "all_results.json"
            _write_json(path, {**_earlier(path), **metrics})

    def save_state(self) -> None:
        """Write `trainer_state.json` into the output folder, on the main process."""
        if self.is_world_process_zero():
            folder = self.output_folder
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def _watch_memory(self) -> None:
        """Count the device's peak from here on, where the metrics are to say it."""
        if not self.args.skip_memory_metrics:
            reset_device_peak(self._device)

    def _memory_metrics(self, prefix: str) -> dict[str, float]:
        """Peak memory of process and device in GiB, where `skip_memory_metrics=False` asks for it."""
        return {} if self.args.skip_memory_metrics else memory_metrics(prefix, self._device)

    def store_flos(self) -> None:
        """Kept for scripts that call it; `state.total_flos` is current after every update."""

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """FLOPs of one forward and backward: 6 x parameters x tokens, or the model's own estimate where it has one.

        Parameters of embedding tables are not counted: they are looked up, not multiplied.

        Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
        """
        own = getattr(self.model, "floating_point_ops", None)
        if callable(own):
            return int(own(inputs))
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if main is None else 6 * self._parameter_count * int(main.numel())

    _parameter_count = 0


def _readable(name: str, value: Any) -> Any:
    if name.endswith("_runtime") and isinstance(value, (int, float)):
        minutes, seconds = divmod(float(value), 60)
        hours, minutes = divmod(int(minutes), 60)
        return f"{hours}:{minutes:02}:{seconds:05.2f}"
    if name == "total_flos" and isinstance(value, (int, float)):
        return f"{int(value) >> 30}GF"
    if "_mem_" in name and isinstance(value, (int, float)):
        return f"{int(value) >> 20}MB"
    return round(value, 4) if isinstance(value, float) else value


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=4, sort_keys=True) + "\n", encoding="utf-8")


def _earlier(path: Path) -> dict[str, Any]:
    """The metrics that a file holds; none where there is none, or it is damaged, which is said."""
    if not path.exists():
        return {}
    try:
        found = strict_json.parse(Files().read(path, MAX_JSON_BYTES), str(path), allow_nan=True)
    except CheckpointError as error:
        logger.warning("%s: it is written anew", error)
        return {}
    return found if isinstance(found, dict) else {}
