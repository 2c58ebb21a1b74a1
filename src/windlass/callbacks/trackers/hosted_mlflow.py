"""Services that take the runs of MLflow: Azure ML and DagsHub."""

from __future__ import annotations

import os
from typing import ClassVar

from windlass.callbacks.tracker import main_only
from windlass.callbacks.trackers.mlflow import MLflowTracker
from windlass.core.errors import ConfigError, Problem
from windlass.core.optional import require

_ADDRESS = "MLFLOW_TRACKING_URI"
_SUFFIX = ".mlflow"


@main_only
class HostedMLflowTracker(MLflowTracker):
    """A run of MLflow at `$MLFLOW_TRACKING_URI`, which is the address of a service. The arguments are those of
    `MLflowTracker`.

    Raises:
        ConfigError: the variable is not set.
    """

    in_all = False  # "all" has MLflow already
    # What the variable is at the service.
    address: ClassVar[str] = ""

    def start(self) -> None:
        if not os.environ.get(_ADDRESS):
            raise ConfigError(Problem(_ADDRESS, None, f"set it to {self.address}"))
        super().start()


class AzureMLTracker(HostedMLflowTracker):
    """A run in a workspace of Azure ML, by the package `azureml-mlflow`. In a job of Azure ML the variable is set."""

    name = "azure_ml"
    packages = ("mlflow", "azureml")
    address = "the azureml:// address of the workspace (az ml workspace show --query mlflow_tracking_uri)"


@main_only
class DagsHubTracker(HostedMLflowTracker):
    """A run in a repository of DagsHub. Without `$MLFLOW_TRACKING_USERNAME` the package `dagshub` logs in, and makes a
    missing repository.
    """

    name = "dagshub"
    packages = ("mlflow", "dagshub")
    address = f"https://dagshub.com/OWNER/REPOSITORY{_SUFFIX}"

    def start(self) -> None:
        uri = os.environ.get(_ADDRESS, "")
        if uri.endswith(_SUFFIX) and "MLFLOW_TRACKING_USERNAME" not in os.environ:
            require("dagshub", "report to DagsHub").init(url=uri.removesuffix(_SUFFIX), mlflow=True)
        super().start()
