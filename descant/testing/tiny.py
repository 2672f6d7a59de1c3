"""Tiny random models on disk, in the files that transformers reads: one per architecture that the tests exercise.

``tiny_model("llama", tmp_path)`` makes a directory that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load in
milliseconds. Weights are seeded and larger than a fresh initialisation, biases and norms are not left at 0 and 1, so
that a path which drops one of them gives other numbers. The tokenizer has one token a byte, an end token and a chat
template.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 264  # 4 special tokens, 256 bytes, 4 that mean nothing
MAX_CONTEXT_LENGTH = 512

END_OF_TEXT, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, UNKNOWN)
EOS_TOKEN_ID = SPECIAL_TOKENS.index(TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_GQA: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}

PACKABLE: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_GQA, "model_type": "llama"},
    "llama_tied": {**_GQA, "model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": 3},
    "qwen2": {**_GQA, "model_type": "qwen2"},
    "qwen3": {**_GQA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gemma": {**_GQA, "model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {**_GQA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "mistral": {**_GQA, "model_type": "mistral", "sliding_window": 16},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rotary_pct": 0.5,
    },
    "qwen3_moe": {
        **_GQA,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
}
"""Architectures whose sequences meet only inside the attention function."""

SERVED: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True},
    "phi3": {**_GQA, "model_type": "phi3"},
    "gemma3_text": {
        **_GQA,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 16,
        "tie_word_embeddings": True,
    },
    "cohere": {**_GQA, "model_type": "cohere", "logit_scale": 0.25},
    "granite": {
        **_GQA,
        "model_type": "granite",
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
    },
    "olmo2": {**_GQA, "model_type": "olmo2"},
}
"""Beside ``PACKABLE``: transposed weights, fused products, logits that are scaled."""

_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_ROUTED: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**_GQA, **_MLA, **_ROUTED, "model_type": "deepseek_v2", "topk_method": "greedy"},
    "deepseek_v3": {**_GQA, **_MLA, **_ROUTED, "model_type": "deepseek_v3"},
    "glm4_moe": {**_GQA, **_ROUTED, "model_type": "glm4_moe", "head_dim": 8, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {**_GQA, **_MLA, **_ROUTED, "model_type": "glm4_moe_lite"},
    "dots1": {**_GQA, **_ROUTED, "model_type": "dots1", "head_dim": 8},
    "qwen2_moe": {
        **_GQA,
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "qwen3_moe_dense": {**_GQA, **_EXPERTS, "model_type": "qwen3_moe", "head_dim": 16, "mlp_only_layers": [0]},
    "mixtral": {**_GQA, **_LOCAL, "model_type": "mixtral"},
    "phimoe": {**_GQA, **_LOCAL, "model_type": "phimoe", "head_dim": 8},
    "minimax_m2": {**_GQA, **_LOCAL, "model_type": "minimax_m2", "head_dim": 8},
    "granitemoe": {**_GQA, **_LOCAL, "model_type": "granitemoe"},
    "olmoe": {**_GQA, **_EXPERTS, "model_type": "olmoe"},
    "flex_olmo": {**_GQA, **_EXPERTS, "model_type": "flex_olmo"},
    "hunyuan_v1_moe": {**_GQA, "model_type": "hunyuan_v1_moe", "head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ernie4_5_moe": {
        **_GQA,
        "model_type": "ernie4_5_moe",
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "exaone_moe": {
        **_GQA,
        **_ROUTED,
        **_EXPERTS,
        "model_type": "exaone_moe",
        "head_dim": 8,
        "num_shared_experts": 1,
        "sliding_window": 16,
    },
    "solar_open": {**_GQA, **_ROUTED, "model_type": "solar_open", "head_dim": 8},
    "afmoe": {
        **_GQA,
        **_EXPERTS,
        "model_type": "afmoe",
        "head_dim": 8,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "sliding_window": 16,
    },
    "lfm2_moe": {
        **_GQA,
        **_EXPERTS,
        "model_type": "lfm2_moe",
        "layer_types": ["full_attention", "full_attention"],
        "num_dense_layers": 1,
    },
}
"""Mixtures of experts, which are fused into parameters; most have dense layers or a shared expert beside them."""

NOT_PACKABLE: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {
        **_GQA,
        "model_type": "qwen3_next",
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mamba": {
        "model_type": "mamba",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "conv_kernel": 4,
        "expand": 2,
    },
    "llama_longrope": {**_GQA, "model_type": "llama", "rope_parameters": _LONGROPE},
    "llama_dynamic": {
        **_GQA,
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 64,
    },
}
"""Architectures whose packed sequences would change one another: loading must refuse them or run them one by one."""

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {**PACKABLE, **SERVED, **EXPERTS, **NOT_PACKABLE}


def tiny_model(arch: str, directory: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a tiny random model and its tokenizer into ``directory`` (made if absent) and returns it.

    ``arch``: a key of ``ARCHITECTURES``. ``overrides`` change fields of the transformers config, for instance
    ``vocab_size=16`` for a distribution that can be enumerated (the tokenizer stays at ``VOCAB_SIZE`` then).
    Weights are fp32. The same arguments give the same bits.
    """
    directory = Path(directory)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_CONTEXT_LENGTH,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        **ARCHITECTURES[arch],
        **overrides,
    }
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                _randomise(parameter)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def _randomise(parameter: torch.Tensor) -> None:
    if parameter.ndim >= 2:  # wide enough that attention is not uniform, small enough that logits stay within ~10
        parameter.normal_(std=0.12 if min(parameter.shape[-2:]) > 8 else 0.3)
    else:  # norms keep their 1 (or 0), biases their 0; both get something to lose
        parameter.add_(torch.randn_like(parameter) * 0.1)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: every string has tokens, not every token sequence is valid UTF-8."""
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
