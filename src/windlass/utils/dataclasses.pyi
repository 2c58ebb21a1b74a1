from windlass.compat.plugin_engines import (
    BnbQuantizationConfig as BnbQuantizationConfig, DeepSpeedPlugin as DeepSpeedPlugin,
    FP8RecipeKwargs as FP8RecipeKwargs, MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    MegatronLMPlugin as MegatronLMPlugin, TERecipeKwargs as TERecipeKwargs,
)
from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from windlass.compat.plugins import (
    AORecipeKwargs as AORecipeKwargs, ComputeEnvironment as ComputeEnvironment, CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs, DynamoBackend as DynamoBackend,
    ParallelismConfig as ParallelismConfig, PipelineParallelConfig as PipelineParallelConfig,
    PrecisionType as PrecisionType, SageMakerDistributedType as SageMakerDistributedType,
    TorchContextParallelConfig as TorchContextParallelConfig, TorchDynamoPlugin as TorchDynamoPlugin,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from windlass.config.enums import (
    DistributedType as DistributedType, FP8BackendType as FP8BackendType, LoggerType as LoggerType,
    RNGType as RNGType,
)
from windlass.config.loop_options import (
    AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration,
    GradScalerKwargs as GradScalerKwargs, GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs, KwargsHandler as KwargsHandler,
    ProfileKwargs as ProfileKwargs, ProjectConfiguration as ProjectConfiguration,
)
