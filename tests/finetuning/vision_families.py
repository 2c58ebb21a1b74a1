"""Six small models that see images, each with its processor: built from configurations, with images by Pillow alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.versions import needs

LOADED = needs(
    "transformers", "5.23", "5.17 does not load the images of a saved Idefics 3 without torchvision"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024,
}  # fmt: skip
_QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + '</s>' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
_IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_PALIGEMMA = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<image>' }}"
    "{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def tokenizer(special: list[str], template: str | None = None, end: str = "</s>", **extra: str) -> Any:
    """One token for each byte, after `<pad>`, `<s>`, the end token and those of a family."""
    import tokenizers as tk
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    inner = tk.Tokenizer(tk.models.BPE(vocab={entry: i for i, entry in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tk.decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token=end,
        extra_special_tokens=extra or None,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    made.chat_template = template
    return made


def _qwen_tokenizer() -> Any:
    special = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    return tokenizer(special, _QWEN, "<|im_end|>")


def _qwen_model(kind: str, made: Any, **sizes: Any) -> Any:
    import transformers

    vocabulary = made.get_vocab()
    config = getattr(transformers, f"{kind}Config")(
        text_config={**_TEXT, "vocab_size": len(vocabulary),
                     "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}},
        vision_config=sizes, image_token_id=vocabulary["<|image_pad|>"], video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"], vision_end_token_id=vocabulary["<|vision_end|>"],
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _qwen2_5() -> tuple[Any, Any]:
    from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made = _qwen_tokenizer()
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    processor = _without_video(Qwen2_5_VLProcessor, images, made)
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
             "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "out_hidden_size": 16,
             "fullatt_block_indexes": [0]}  # fmt: skip
    return _qwen_model("Qwen2_5_VL", made, **sizes), processor


def _qwen3() -> tuple[Any, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl import Qwen3VLProcessor

    made = _qwen_tokenizer()
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    processor = _without_video(Qwen3VLProcessor, images, made)
    sizes = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
             "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 16,
             "deepstack_visual_indexes": [0], "num_position_embeddings": 64}  # fmt: skip
    return _qwen_model("Qwen3VL", made, **sizes), processor


def _without_video(kind: Any, images: Any, made: Any) -> Any:
    """A processor for images alone: that of videos needs torchvision."""

    class OfImages(kind):  # type: ignore[misc]
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
        ) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    return OfImages(images, made, chat_template=made.chat_template)


def _llava() -> tuple[Any, Any]:
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava import LlavaProcessor

    made = tokenizer(["<image>"], _LLAVA)
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        images, made, patch_size=8, vision_feature_select_strategy="default", chat_template=_LLAVA,
        num_additional_image_tokens=1,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        text_config={**_TEXT, "model_type": "llama", "vocab_size": len(made)},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24,
                       "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
                       "projection_dim": 16},
        image_token_id=made.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config), processor


def _idefics3() -> tuple[Any, Any]:
    import transformers
    from transformers.models.idefics3 import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    grid = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    made = tokenizer(["<|im_start|>", "<global-img>", *grid], _IDEFICS, "<end_of_utterance>")
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=True
    )
    processor = Idefics3Processor(images, made, image_seq_len=4, chat_template=_IDEFICS)
    config = transformers.Idefics3Config(
        text_config={**_TEXT, "model_type": "llama", "vocab_size": len(made)},
        vision_config={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 4},
        image_token_id=processor.image_token_id, scale_factor=2, pad_token_id=made.pad_token_id,
    )  # fmt: skip
    return transformers.Idefics3ForConditionalGeneration(config), processor


def _gemma3() -> tuple[Any, Any]:
    import transformers
    from transformers.models.gemma3 import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    made = tokenizer(["<start_of_turn>", *named.values()], _GEMMA, "<end_of_turn>", **named)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = Gemma3Processor(images, made, chat_template=_GEMMA, image_seq_length=4)
    vocabulary = made.get_vocab()
    config = transformers.Gemma3Config(
        text_config={**_TEXT, "vocab_size": len(made), "sliding_window": 512},
        vision_config={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4, boi_token_index=vocabulary["<start_of_image>"],
        eoi_token_index=vocabulary["<end_of_image>"], image_token_id=vocabulary["<image_soft_token>"],
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config), processor


def _paligemma() -> tuple[Any, Any]:
    import transformers
    from transformers.models.paligemma import PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    made = tokenizer(["<image>"], _PALIGEMMA)
    images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.image_seq_length = 4
    processor = PaliGemmaProcessor(images, made, chat_template=_PALIGEMMA)
    config = transformers.PaliGemmaConfig(
        text_config={**_TEXT, "model_type": "gemma", "vocab_size": len(made)},
        vision_config={"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24,
                       "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
                       "vision_use_head": False, "projection_dim": 16},
        image_token_id=processor.image_token_id, projection_dim=16,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2.5-vl": _qwen2_5,
    "qwen3-vl": _qwen3,
    "llava": _llava,
    "idefics3": _idefics3,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
}


def family(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A model with new weights of float32, all of them large enough to matter, and its processor."""
    torch.manual_seed(seed)
    model, processor = FAMILIES[name]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
    return model, processor


def picture(seed: int, width: int = 16, height: int = 16) -> Any:
    """An image of random colours."""
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def rows(count: int = 6, sizes: tuple[tuple[int, int], ...] = ((16, 16), (24, 16), (32, 32))) -> list[Any]:
    """Conversations of one question and one answer on an image."""
    return [
        {
            "images": [picture(i, *sizes[i % len(sizes)])],
            "messages": [
                {"role": "user", "content": f"What is it, {i}?"},
                {"role": "assistant", "content": f"It is {i * 7}."},
            ],
        }
        for i in range(count)
    ]
