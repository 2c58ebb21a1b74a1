from windlass.config.enums import DebugOption as DebugOption
from windlass.transforms.overflow_watch import DebugUnderflowOverflow as DebugUnderflowOverflow
