"""Re-exports of the old library: experiment trackers (`windlass.callbacks.tracker_registry`)."""

from windlass.callbacks.tracker import GeneralTracker as GeneralTracker
from windlass.callbacks.tracker import on_main_process as on_main_process
from windlass.callbacks.tracker_registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from windlass.callbacks.tracker_registry import filter_trackers as filter_trackers
from windlass.callbacks.tracker_registry import get_available_trackers as get_available_trackers
from windlass.callbacks.tracker_registry import register_tracker_class as register_tracker_class

AimTracker = LOGGER_TYPE_TO_CLASS["aim"]
ClearMLTracker = LOGGER_TYPE_TO_CLASS["clearml"]
CometMLTracker = LOGGER_TYPE_TO_CLASS["comet_ml"]
DVCLiveTracker = LOGGER_TYPE_TO_CLASS["dvclive"]
MLflowTracker = LOGGER_TYPE_TO_CLASS["mlflow"]
SwanLabTracker = LOGGER_TYPE_TO_CLASS["swanlab"]
TensorBoardTracker = LOGGER_TYPE_TO_CLASS["tensorboard"]
TrackioTracker = LOGGER_TYPE_TO_CLASS["trackio"]
WandBTracker = LOGGER_TYPE_TO_CLASS["wandb"]
