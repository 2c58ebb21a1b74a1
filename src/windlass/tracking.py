"""Names that scripts import from here: experiment trackers (`windlass.callbacks.tracker_registry`)."""

from windlass.callbacks.tracker import GeneralTracker, on_main_process
from windlass.callbacks.tracker_registry import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)

AimTracker = LOGGER_TYPE_TO_CLASS["aim"]
ClearMLTracker = LOGGER_TYPE_TO_CLASS["clearml"]
CometMLTracker = LOGGER_TYPE_TO_CLASS["comet_ml"]
DVCLiveTracker = LOGGER_TYPE_TO_CLASS["dvclive"]
MLflowTracker = LOGGER_TYPE_TO_CLASS["mlflow"]
SwanLabTracker = LOGGER_TYPE_TO_CLASS["swanlab"]
TensorBoardTracker = LOGGER_TYPE_TO_CLASS["tensorboard"]
TrackioTracker = LOGGER_TYPE_TO_CLASS["trackio"]
WandBTracker = LOGGER_TYPE_TO_CLASS["wandb"]

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
