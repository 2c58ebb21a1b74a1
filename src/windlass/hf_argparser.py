"""Names that scripts import from here: the parser of command lines, loaded when they are first asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.config.flags": ("make_choice_type_function", "string_to_bool"),
    "windlass.config.parser": ("HfArg", "HfArgumentParser"),
})  # fmt: skip
