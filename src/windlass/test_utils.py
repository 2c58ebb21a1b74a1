"""Names that tests of scripts import from here (`windlass.compat.testing_tools`), loaded when they are asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.compat.testing_tools": (
        "DEFAULT_LAUNCH_COMMAND", "RegressionDataset", "RegressionModel", "are_the_same_tensors", "assert_exception",
        "capture_call_output", "device_count", "execute_subprocess_async", "get_launch_command",
        "get_torch_dist_unique_port", "memory_allocated_func", "require_bnb", "require_cpu", "require_cuda",
        "require_cuda_or_hpu", "require_cuda_or_xpu", "require_fp16", "require_huggingface_suite", "require_mlu",
        "require_mps", "require_multi_device", "require_multi_gpu", "require_multi_gpu_or_xpu", "require_multi_xpu",
        "require_musa", "require_non_cpu", "require_non_hpu", "require_non_xpu", "require_npu", "require_sdaa",
        "require_single_device", "require_single_gpu", "require_single_xpu", "require_torch_min_version",
        "require_torchvision", "require_xpu", "skip", "slow", "torch_device",
    ),
})  # fmt: skip
