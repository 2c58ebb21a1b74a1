from windlass.compat.parser import (
    HfArg as HfArg, HfArgumentParser as HfArgumentParser,
    make_choice_type_function as make_choice_type_function, string_to_bool as string_to_bool,
)
