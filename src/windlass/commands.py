"""Names that scripts import from here: the programs of the command line. They are refused, each with its reason."""

from windlass.compat.refused_names import WHY_NOT_COMMANDS
from windlass.core.lazy import loader_of

__getattr__ = loader_of(__name__, {}, WHY_NOT_COMMANDS)
