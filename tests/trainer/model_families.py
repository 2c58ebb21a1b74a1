"""Families of models of transformers: a tiny one of each, built from its configuration, and rows to train it with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]

VOCABULARY, LENGTH, CLASSES = 48, 8, 3
WIDTH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    **WIDTH,
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
STATES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {**DECODER, "num_experts_per_tok": 2}
VISION = {"image_size": 8, "patch_size": 4, "num_channels": 3, "intermediate_size": 24, **WIDTH}
LABELLED = {"num_labels": CLASSES}


@dataclasses.dataclass(frozen=True)
class Family:
    """One model.

    Attributes:
        model: name of the class in transformers.
        config: arguments of its configuration.
        row: makes the row of a number.
        batch: what every batch has besides the rows.
    """

    model: str
    config: dict[str, Any]
    row: Callable[[int], Row]
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> Any:
        import transformers

        cls = getattr(transformers, self.model)
        torch.manual_seed(3)
        return cls(cls.config_class(**self.config))

    def collate(self, rows: list[Row]) -> Row:
        """Tensors stacked; anything else, such as the boxes of an image, as a list."""
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        stacked = {
            name: torch.stack(values) if isinstance(values[0], Tensor) else values
            for name, values in columns.items()
        }
        return {**stacked, **self.batch}


# --- rows -------------------------------------------------------------------------------------------------------------


def _of(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def _tokens(index: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY - 1, (length,), generator=_of(index))


def text(index: int) -> Row:
    ids = _tokens(index)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def masked(index: int) -> Row:
    ids = _tokens(index)
    labels = torch.where(torch.arange(LENGTH) % 3 == 0, ids, -100)
    return {
        "input_ids": ids.where(labels == -100, 1),
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
    }


def pair(index: int) -> Row:
    return {**text(index), "labels": _tokens(1000 + index, 5)}


def _pixels(index: int, size: int) -> Tensor:
    return torch.randn(3, size, size, generator=_of(index))


def picture(index: int) -> Row:
    return {"pixel_values": _pixels(index, 8), "labels": torch.tensor(index % CLASSES)}


def large_picture(index: int) -> Row:
    return {"pixel_values": _pixels(index, 32), "labels": torch.tensor(index % CLASSES)}


def segmented(index: int) -> Row:
    labels = torch.randint(CLASSES, (16, 16), generator=_of(index))
    return {"pixel_values": _pixels(index, 16), "labels": labels}


def boxes(index: int) -> Row:
    found = {
        "class_labels": torch.tensor([index % CLASSES]),
        "boxes": 0.2 + 0.4 * torch.rand(1, 4, generator=_of(index)),
    }
    return {"pixel_values": _pixels(index, 16), "labels": found}


def spoken(index: int) -> Row:
    return {"input_values": torch.randn(400, generator=_of(index)), "labels": _tokens(index, 3) % 9 + 3}


def classified_speech(index: int) -> Row:
    return {
        "input_values": torch.randn(400, generator=_of(index)),
        "labels": torch.tensor(index % CLASSES),
    }


def heard(index: int) -> Row:
    return {"input_features": torch.randn(8, 16, generator=_of(index)), "labels": _tokens(index, 5)}


def caption(index: int) -> Row:
    return {key: value for key, value in seen(index).items() if key != "labels"}


def seen(index: int) -> Row:
    return {**text(index), "pixel_values": _pixels(index, 8)}


def shown(index: int) -> Row:
    """The four patches of an image stand in the text."""
    row = seen(index)
    row["input_ids"][:4] = VOCABULARY - 1
    return {**row, "labels": row["input_ids"].where(torch.arange(LENGTH) > 3, -100)}


# --- the table --------------------------------------------------------------------------------------------------------

_WAVES = {
    "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12, "intermediate_size": 24,
    "mask_time_length": 2, "mask_feature_length": 2, **WIDTH,
}  # fmt: skip
_LLAMA = {**DECODER, "model_type": "llama"}
_CLIP_TEXT = {**ENCODER, "projection_dim": 8, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = {
    # Language models
    "llama": Family("LlamaForCausalLM", DECODER, text),
    "mistral": Family("MistralForCausalLM", {**DECODER, "sliding_window": 4}, text),
    "qwen2": Family("Qwen2ForCausalLM", DECODER, text),
    "qwen3": Family("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}, text),
    "gemma2": Family("Gemma2ForCausalLM", {**DECODER, "head_dim": 8, "query_pre_attn_scalar": 8}, text),
    "gemma3": Family("Gemma3ForCausalLM", {**DECODER, "head_dim": 8, "query_pre_attn_scalar": 8}, text),
    "phi3": Family("Phi3ForCausalLM", DECODER, text),
    "olmo2": Family("Olmo2ForCausalLM", DECODER, text),
    "granite": Family("GraniteForCausalLM", DECODER, text),
    "gpt2": Family("GPT2LMHeadModel", {**GPT, "n_positions": 32}, text),
    "gpt_neox": Family("GPTNeoXForCausalLM", {**ENCODER, "bos_token_id": 1, "eos_token_id": 2}, text),
    "opt": Family("OPTForCausalLM", {**ENCODER, "ffn_dim": 24, "word_embed_proj_dim": 16}, text),
    "falcon": Family("FalconForCausalLM", {**WIDTH, "vocab_size": VOCABULARY, "alibi": True}, text),
    "bloom": Family("BloomForCausalLM", {**GPT, "hidden_size": 16}, text),
    # Mixtures of experts
    "mixtral": Family("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4, "output_router_logits": True}, text),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
        text,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
        text,
    ),
    "olmoe": Family("OlmoeForCausalLM", {**EXPERTS, "num_experts": 4}, text),
    "gpt_oss": Family("GptOssForCausalLM", {**EXPERTS, "num_local_experts": 4, "head_dim": 8}, text),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            **EXPERTS, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "moe_intermediate_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
        },
        text,
    ),
    # State-space models
    "mamba": Family("MambaForCausalLM", {**STATES, "state_size": 4}, text),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        {**STATES, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        text,
    ),
    "jamba": Family(
        "JambaForCausalLM",
        {**EXPERTS, "num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
        text,
    ),
    # Encoders
    "bert": Family("BertForMaskedLM", ENCODER, masked),
    "roberta": Family("RobertaForMaskedLM", ENCODER, masked),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
        masked,
    ),
    "electra": Family("ElectraForMaskedLM", {**ENCODER, "embedding_size": 16}, masked),
    "deberta_v2": Family(
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
        masked,
    ),
    "modernbert": Family("ModernBertForMaskedLM", ENCODER, masked),
    # Encoder-decoders
    "t5": Family(
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
         "decoder_start_token_id": 0},
        pair,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "max_position_embeddings": 32},
        pair,
    ),
    # Images
    "vit": Family("ViTForImageClassification", {**VISION, **LABELLED}, picture),
    "resnet": Family(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", **LABELLED},
        large_picture,
    ),
    "convnext": Family(
        "ConvNextForImageClassification",
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], **LABELLED},
        large_picture,
    ),
    "swin": Family(
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4,
         **LABELLED},
        large_picture,
    ),
    "segformer": Family(
        "SegformerForSemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
         "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
         "decoder_hidden_size": 8, **LABELLED},
        segmented,
    ),
    "yolos": Family(
        "YolosForObjectDetection",
        {**VISION, "image_size": [16, 16], "num_detection_tokens": 4, **LABELLED},
        boxes,
    ),
    # Speech
    "wav2vec2": Family("Wav2Vec2ForCTC", _WAVES, spoken),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "num_mel_bins": 8, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "max_source_positions": 8, "max_target_positions": 16, "decoder_start_token_id": 1, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2},
        heard,
    ),
    # Several kinds of input
    "clip": Family(
        "CLIPModel",
        {"text_config": _CLIP_TEXT, "vision_config": {**VISION, "projection_dim": 8}, "projection_dim": 8},
        caption,
        {"return_loss": True},
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        {"text_config": _LLAMA, "vision_config": {**VISION, "model_type": "clip_vision_model"},
         "image_token_id": VOCABULARY - 1, "vision_feature_layer": -1},
        shown,
    ),
}  # fmt: skip
