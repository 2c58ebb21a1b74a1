"""One resolver for how training is spread over processes, whoever says it: arguments, files, flags, variables."""

from windlass.config.parallel.from_files import from_document, from_file, from_recipe
from windlass.config.parallel.from_launcher import OWN_VARIABLE, from_environment, from_flags, to_environment
from windlass.config.parallel.from_script import from_arguments, from_plugins
from windlass.config.parallel.keys import Key
from windlass.config.parallel.parallel_plan import Parallel, dtype_plans, plan_parallel, uses_deepspeed
from windlass.config.parallel.settings import Setting, Settings, merge
from windlass.config.parallel.table import KEYS

__all__ = [
    "KEYS", "OWN_VARIABLE", "Key", "Parallel", "Setting", "Settings", "dtype_plans", "from_arguments", "from_document",
    "from_environment", "from_file", "from_flags", "from_plugins", "from_recipe", "merge", "plan_parallel",
    "to_environment", "uses_deepspeed",
]  # fmt: skip
