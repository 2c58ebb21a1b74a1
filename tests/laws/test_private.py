"""An object's private attributes are its own: no other object reads, writes or calls them.

A method may use those of another instance of its class. Objects of other libraries have no public way to some of what
is needed; their names stand on a list, each with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.laws.source import Module, modules, nodes

_MODULE = "nn.Module keeps its tensors, children and settings there, and enumerates them in another way"
_CALL = "nn.Module calls through these, and torch.compile replaces one of them"
_TORCH = "a function of PyTorch that its own optimizers and loss scaler use, without a public name"
_AUTOGRAD = "autograd states only there which backward runs, and of which tensor another one is a view"
_WORKERS = "PyTorch's loader keeps its processes there, and does not publish them"
_PASS = "FSDP2 before torch 2.13 forgets a pass that failed under no other name"
_SHARDED = "FSDP2 keeps its groups of parameters there"
_DEBUG = "what hangs can be found out here only"
_DATASETS = "datasets keeps the parts of a stream there"
_SUBMITIT = "submitit knows its parameters and writes its script there"
_ORDER = "DeepSpeed's own objects drop the recorded order of layers by this name"
_ARGPARSE = "argparse has no public name for this type, or for the list of flags"
_NAMED_TUPLE = "a public method of named tuples, whose names begin so lest they clash with fields"
_LAYOUT = "transformers' models keep there what save_pretrained looks at, and nowhere else"
_SCRIPTS = "a name that scripts know from their old library"
_FAKE = "PyTorch states only there what a tensor without memory is, and what an operation does with it"
_MARK = "a mark on a module of the user's, kept apart from the attributes that its author gave it"

THIRD_PARTY = {
    **dict.fromkeys(("_buffers", "_parameters", "_non_persistent_buffers_set", "_metadata"), _MODULE),
    **dict.fromkeys(("_call_impl", "_compiled_call_impl", "_orig_mod"), _CALL),
    **dict.fromkeys(
        ("_C", "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_assert_async", "_dynamo",
         "_execution_engine", "_foreach_mul_", "_foreach_norm", "_fused_adamw_", "_get_default_mps_generator",
         "_inductor", "_NormBase", "_values", "_version", "_get_default_store", "_set_pg_timeout", "_world"),
        _TORCH,
    ),
    **dict.fromkeys(("_XLAC", "_xla_get_tensor_id", "_get_xla_sharding_spec"), _TORCH),
    **dict.fromkeys(
        ("_foreach_add", "_foreach_add_", "_foreach_addcmul_", "_foreach_div", "_foreach_div_", "_foreach_lerp_",
         "_foreach_mul", "_foreach_sign_", "_foreach_sqrt", "_foreach_sqrt_", "_foreach_sub_"),
        _TORCH,
    ),
    **dict.fromkeys(
        ("_autograd", "_base", "_current_graph_task_id", "_get_current_graph_task_keep_graph",
         "_will_engine_execute_node"),
        _AUTOGRAD,
    ),
    "_step_count": "PyTorch's schedules count their steps there, and do not publish them",
    "_schedulers": "PyTorch's schedules of several others keep these there, and do not publish them",
    **dict.fromkeys(("_iterator", "_worker_info"), _WORKERS),
    **dict.fromkeys(("_get_fsdp_state", "_fsdp_param_group", "_fsdp_param_groups"), _SHARDED),
    **dict.fromkeys(("_lazy_init", "_unsharded_param"), _SHARDED),
    **dict.fromkeys(("_comm_ctx", "_state_ctx", "_device", "_device_handle"), _PASS),
    **dict.fromkeys(("_modules_to_run_forward", "_training_state", "_partial_reduce_output"), _PASS),
    **dict.fromkeys(("_post_forward", "_root_post_backward_final_callback"), _SHARDED),
    "_GLOBAL_CLIENT_FACTORY": "huggingface_hub does not publish if a script makes its HTTP client",
    "_keep_in_fp32_modules": "models of transformers name there what stays in float32 when they are quantized",
    **dict.fromkeys(
        ("_op_dispatcher", "_clear_DTensor_sharding_propagator_cache"),
        "DTensor keeps meshes of closed groups there, and has no public way to let them go",
    ),
    "_flatten": "a mesh joins its axes under no other name",
    "_get_dtype_plan": "transformers states there which weights loading keeps in fp32",
    **dict.fromkeys(("_current_frames", "_get_sequence_number_for_group"), _DEBUG),
    "_getframe": "sys has this under no other name",
    "_exit": "os has this under no other name",
    "_close": "torch.elastic ends its processes there, with a signal of the caller's choice",
    **dict.fromkeys(
        ("_attn_implementation", "_can_set_attn_implementation"),
        "transformers' configurations name a model's attention there, and models whether it can be changed",
    ),
    "_from_config": "transformers makes a model of a class that is known, in a dtype, under no other name",
    "_hf_deepspeed_config_weak_ref": "transformers has its setting there; asking for it makes a configuration",
    "_gradient_checkpointing_func": "transformers' models keep there how their blocks are recomputed, and nowhere else",
    "_no_split_modules": "transformers' models name there the layers that stay on one device",
    **dict.fromkeys(("_hf_peft_config_loaded", "_keys_to_ignore_on_save", "_weight_conversions"), _LAYOUT),
    "_name_or_path": "transformers' configurations remember there where they came from",
    **dict.fromkeys(("_ex_iterable", "_starting_state_dict", "_distributed", "_formatting"), _DATASETS),
    **dict.fromkeys(("_convert_mem", "_equivalence_dict", "_make_sbatch_string", "_valid_parameters"), _SUBMITIT),
    "_typed_parameters": _SUBMITIT,
    **dict.fromkeys(("_ActionsContainer", "_SubParsersAction", "_actions"), _ARGPARSE),
    **dict.fromkeys(("_asdict", "_fields"), _NAMED_TUPLE),
    "_invalidate_trace": _ORDER,
    **dict.fromkeys(
        ("_get_norm_groups", "_wait_for_offload_copies"),
        "DeepSpeed measures the norm of divided gradients by these, within its step only",
    ),
    "_offload_accumulated_param_ids": "DeepSpeed notes there, and nowhere else, whose gradients are on the host",
    **dict.fromkeys(
        (
            "_hf_hook", "_is_accelerate_prepared", "_old_forward", "_shared_state",
            "_argument_group_name", "_VALID_DICT_FIELDS",
        ),
        _SCRIPTS,
    ),
    "_checkpoint_offset": "torch.load notes there where the bytes of a tensor are, as its documentation says",
    **dict.fromkeys(
        (
            "_get_dispatch_mode", "_TorchDispatchModeKey", "_cdata", "_local_tensor", "_to_copy", "_local_scalar_dense",
            "_get_sequence_nr", "_current_autograd_node", "_sequence_nr", "_schema", "_overloadpacket",
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_resolve_process_group", "_chunk_with_empty", "_apply", "_grouped_mm", "_no_grad_trunc_normal_",
            "_get_foreach_kernels_supported_devices", "_foreach_supported_types",
        ),
        _FAKE,
    ),
    "_make_wrapper_subclass": "PyTorch makes tensors without memory under no other name",
    **dict.fromkeys(("_is_gathered", "_sharded_by", "_recompute", "_without_memory"), _MARK),
}  # fmt: skip

# What scripts override under these names, and a run therefore calls.
OVERRIDABLE = {
    "src/windlass/trainer/hooks.py": {
        "_prepare_inputs", "_save", "_save_checkpoint", "_checkpoint_committed", "_determine_best_metric",
        "_load_from_checkpoint", "_load_best_model", "_load_rng_state", "_load_optimizer_and_scheduler",
        "_clip_grad_norm", "_evaluate", "_maybe_log_save_evaluate", "_wrap_model", "_get_learning_rate",
    }
}  # fmt: skip
NOT_YET = {
    "src/windlass/data/samplers.py": {"_num_samples"},
}

EXCEPT = {**OVERRIDABLE, **NOT_YET}
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def _own_names(owner: ast.ClassDef) -> set[str]:
    """Private names that a class defines: methods, annotations, and what its methods assign to themselves."""
    found = {n.name for n in owner.body if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(owner):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return found


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign(tree: ast.AST, own: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """(line, name) of each private attribute of another object that a file touches."""
    for node in ast.iter_child_nodes(tree):
        inner = own | _own_names(node) if isinstance(node, ast.ClassDef) else own
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_self(node.value):
            if node.attr not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in own:
                yield node.lineno, str(name.value)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attributes_of"
        ):
            yield from (
                (node.lineno, str(k.arg)) for k in node.keywords if _is_private(k.arg) and k.arg not in own
            )
        yield from foreign(node, inner)


def _imported(module: Module) -> Iterator[tuple[int, str]]:
    """Private functions and classes of one file that another one imports."""
    for node in nodes(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("windlass"):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_private(alias.name))


def test_private_attributes_are_used_by_their_owner_alone() -> None:
    found = [
        f"{module.where}:{line} {name}"
        for module in modules()
        for line, name in (*foreign(module.tree), *_imported(module))
        if name not in THIRD_PARTY and name not in EXCEPT.get(module.where, ())
    ]
    assert not found, "give the owner a public method or property:\n" + "\n".join(found)


def test_the_lists_are_true() -> None:
    used = {(module.where, name) for module in modules() for _, name in foreign(module.tree)}
    assert THIRD_PARTY.keys() <= {name for _, name in used}
    assert {(where, name) for where, names in EXCEPT.items() for name in names} <= used


@pytest.mark.parametrize(
    "source",
    [
        "def f(run): return run._plan.seed",
        "def f(run): run.trainer._steps = 1",
        "def f(run): return getattr(run, '_plan', None)",
        "class A:\n    def f(self): return self._run._plan",
        "def f(run): return attributes_of(run, _plan=None)",
    ],
)
def test_the_law_sees(source: str) -> None:
    assert list(foreign(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self): return self._plan",
        "class A:\n    _at: int\n    def f(self, other): return self._at < other._at",
        "class A(B):\n    def f(self): return super()._plan()",
        "def f(run): return run.__class__",
    ],
)
def test_the_law_lets_an_owner_be(source: str) -> None:
    assert not list(foreign(ast.parse(source)))
