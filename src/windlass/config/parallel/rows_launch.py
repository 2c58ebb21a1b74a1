"""The settings of launchers: processes, machines, rendezvous, logs and restarts."""

from __future__ import annotations

from windlass.config import kinds
from windlass.config.parallel.keys import NO_MEGATRON, Rows

_PODS = (
    "starts processes on a pod of TPUs, and one process drives all devices of PyTorch/XLA: start the script itself on "
    "one machine with TPUs"
)
_DOWNCAST = "is gone from PyTorch/XLA; use --mixed_precision bf16"
_AWS = "needs Amazon SageMaker, which is not built; start `windlass launch` on the machines themselves"
_MPI = "is not built; start `windlass launch` with --machine_rank on every machine, or use --engine slurm"

_row = Rows("launch")
PROCESSES = _row("processes", kinds.whole, None, "Processes on all machines.", "num_processes")
MACHINES = _row("machines", kinds.positive, 1, "Number of machines.", "num_machines")
MACHINE_RANK = _row("machine_rank", kinds.natural, 0, "Index of this machine, from 0.")
MAIN_ADDRESS = _row(
    "main_address", kinds.text, None, "Address of the machine of rank 0.", "main_process_ip", "main_address"
)
MAIN_PORT = _row(
    "main_port",
    kinds.port,
    None,
    "Port on it; 0 selects a free one on one machine.",
    "main_process_port",
    "main_port",
)
_MEETINGS = kinds.OneOf(
    "static", "c10d", refused=dict.fromkeys(("etcd", "etcd-v2"), "is not built; use static or c10d")
)
RENDEZVOUS = _row(
    "rendezvous",
    _MEETINGS,
    "static",
    "How machines find each other: by their ranks (static), or dynamically (c10d).",
    "rdzv_backend",
)
RENDEZVOUS_OPTIONS = _row(
    "rendezvous_options", kinds.options, {}, "Options of the rendezvous, as key=value pairs.", "rdzv_conf"
)
TOKEN_FILE = _row(
    "token_file",
    kinds.text,
    None,
    "File with the shared secret of the machines of a job; by default WINDLASS_RDZV_TOKEN.",
    "rdzv_token_file",
)
MAX_RESTARTS = _row("max_restarts", kinds.natural, 0, "How often a failed job is restarted.")
MONITOR_INTERVAL = _row(
    "monitor_interval", kinds.positive_seconds, 0.1, "Seconds between checks of the processes."
)
LOG_DIR = _row("log_dir", kinds.text, None, "Folder for the output of the processes.")
TEE = _row("tee", kinds.text, "0", "Streams that go to both the console and the folder (0-3, or RANK:N,...).")
THREADS = _row(
    "threads", kinds.positive, None, "Threads of each process.", "num_cpu_threads_per_process", "threads"
)
DEVICES = _row(
    "devices",
    kinds.text,
    "all",
    "Numbers of the accelerators to use, separated by commas.",
    "gpu_ids",
    "devices",
)
AFFINITY = _row.switch("affinity", "Bind each process to its own CPU cores.", "enable_cpu_affinity")
ENGINE = _row("engine", kinds.OneOf("local", "slurm", "ray"), "local", "What starts the processes.")
ENGINE_OPTIONS = _row("engine_options", kinds.options, {}, "Options of the engine.")
STALL_TIMEOUT = _row(
    "stall_timeout",
    kinds.positive_seconds,
    None,
    "Seconds without progress after which the job is stopped and reported.",
)
MACHINE_TIMEOUT = _row(
    "machine_timeout",
    kinds.positive_seconds,
    30.0,
    "Seconds without a message from another machine after which it is considered lost.",
)
PREEMPTION_GRACE = _row(
    "preemption_grace", kinds.positive, 120, "Seconds that processes have to save after a request to exit."
)
REQUEUE = _row.switch(
    "requeue", "After exit code 75 requeue the job in Slurm, or restart it if there is no Slurm."
)
MAX_REQUEUES = _row("max_requeues", kinds.natural, None, "How often at most; by default without a limit.")
ROLE = _row("role", kinds.text, "default", "Name of the processes in the logs.")
ENVIRONMENT = _row(
    "environment",
    kinds.variables,
    {},
    "Environment variables for every process, as NAME=value.",
    "environment",
    "env",
)
TPU = _row.switch("tpu", "Train on the devices of PyTorch/XLA, and fail if there are none.")

MULTI_GPU = _row.switch(
    "multi_gpu",
    "Several accelerators.",
    idle="is not needed: num_processes decides, and all accelerators are used",
)
_WITHOUT_EFFECT = (
    _row.switch("same_network", "The machines share a network.", written=True,
         idle="has no effect: the machines connect to main_process_ip in any case"),
    _row.switch("quiet", "Short reports of failures.",
         idle="has no effect: reports of failures are always short"),
    _row.switch("no_tpu_cluster", "No pod of TPUs.",
         idle="is not needed: jobs on pods of TPUs are not started"),
    _row("main_training_function", kinds.text, "main", "Name of a function for TPU pods.",
         idle="has no effect: scripts are started as a whole"),
)  # fmt: skip

_file, _deepspeed, _megatron = Rows("file"), Rows("deepspeed"), Rows("megatron")
_row.refuse(NO_MEGATRON, "use_megatron_lm")
_row.refuse(_PODS, "tpu_use_cluster", "tpu_cluster", "tpu_use_sudo", "vm")
_row.refuse(_DOWNCAST, "downcast_bf16")
_row.refuse(_AWS, "aws_access_key_id", "aws_secret_access_key")
_row.refuse(_MPI, "mpirun_hostfile")
_row.refuse("is torchrun's: give --num_processes, the number on all machines together", "nproc_per_node")
_row.refuse("is torchrun's: give --num_machines", "nnodes")
_row.refuse("is torchrun's: give --machine_rank", "node_rank")
_file.refuse(_PODS, "tpu_vm", "tpu_env", "tpu_name", "tpu_zone", "command_file", "commands")
_file.refuse(_AWS,
    "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version",
    "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args",
    "use_sagemaker"
)  # fmt: skip
_file.refuse(_MPI, "mpirun_ccl")
_deepspeed.refuse(
    "is for starting over ssh: start `windlass launch` with --machine_rank on every machine, or use --engine slurm",
    *(
        f"deepspeed_{word}"
        for word in ("hostfile", "exclusion_filter", "inclusion_filter", "multinode_launcher")
    ),
)
_megatron.refuse(NO_MEGATRON,
    "no_load_optim", "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d", "no_save_optim", "optimizer_cpu_offload",
    "use_precision_aware_optimizer", "decoder_last_pipeline_num_layers", "num_micro_batches", "sequence_parallelism",
    "recompute_activations", "use_distributed_optimizer", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "attention_backend", "expert_model_parallel_size", "context_parallel_size",
    "attention_dropout", "hidden_dropout", "attention_softmax_in_fp32", "expert_tensor_parallel_size",
    "calculate_per_token_loss", "use_rotary_position_embeddings",
    tp_degree=1, pp_degree=1, use_custom_fsdp=False, gradient_clipping=1.0
)  # fmt: skip
LAUNCH, DEEPSPEED, MEGATRON = (*_row, *_file), tuple(_deepspeed), tuple(_megatron)
