"""Small encoder-decoders and data that the tests of this room share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PAD, END, VOCABULARY = 0, 1, 24
SIZES = {"t5": "T5", "bart": "Bart", "marian": "Marian"}


def encoder_decoder(kind: str = "t5", seed: int = 0) -> Any:
    """A model of some thousand weights, all large enough that generated ids depend on them."""
    import transformers

    torch.manual_seed(seed)
    shared = {"vocab_size": VOCABULARY, "d_model": 16, "pad_token_id": PAD, "eos_token_id": END}
    if kind == "t5":
        config: Any = transformers.T5Config(
            d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=PAD, **shared
        )
    else:
        config = getattr(transformers, f"{SIZES[kind]}Config")(
            encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=40, dropout=0.0,
            decoder_start_token_id=PAD, bos_token_id=2, forced_eos_token_id=None, **shared,
        )  # fmt: skip
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config.bos_token_id = 2
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.8)
    return model


def pairs(count: int = 11, labelled: bool = True, seed: int = 5) -> list[dict[str, Any]]:
    """Sources of 3 to 9 tokens, and their reversal as target."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (count,), generator=generator).tolist()
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, **({"labels": [*row[::-1], END]} if labelled else {})} for row in rows]


def tokenizer() -> Any:
    """One token for each id: token 7 is the text "w7"."""
    import tokenizers
    import transformers

    words = {"<pad>": PAD, "</s>": END, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments under names that transformers has too."""
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "learning_rate": 0.01, "max_steps": 3, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "optim": "adamw_torch", "predict_with_generate": True, **changes,
    }  # fmt: skip
