"""Names that scripts import from here: inference through a pipeline. Its parts are refused, each with its reason."""

from windlass.compat.pipeline_inference import prepare_pippy as prepare_pippy
from windlass.compat.refused_names import WHY
from windlass.core.lazy import loader_of

__getattr__ = loader_of(__name__, {}, WHY)
