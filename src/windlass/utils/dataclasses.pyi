from windlass.compat.plugin_engines import (
    BnbQuantizationConfig as BnbQuantizationConfig, DeepSpeedPlugin as DeepSpeedPlugin,
    FP8RecipeKwargs as FP8RecipeKwargs, MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    MegatronLMPlugin as MegatronLMPlugin, TERecipeKwargs as TERecipeKwargs,
)
from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from windlass.compat.plugins import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    ParallelismConfig as ParallelismConfig, PipelineParallelConfig as PipelineParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from windlass.compat.plugins import (
    ComputeEnvironment as ComputeEnvironment, CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType, DynamoBackend as DynamoBackend,
    PrecisionType as PrecisionType, SageMakerDistributedType as SageMakerDistributedType,
)
from windlass.compat.plugins import (
    AORecipeKwargs as AORecipeKwargs, DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from windlass.config.enums import (
    DistributedType as DistributedType, FP8BackendType as FP8BackendType, LoggerType as LoggerType,
    RNGType as RNGType,
)
from windlass.config.loop_options import (
    AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration,
    GradScalerKwargs as GradScalerKwargs, GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs, ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
)
from windlass.config.loop_options import KwargsHandler as KwargsHandler
