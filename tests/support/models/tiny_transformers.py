"""The built-in families of models in a size that is captured in a second."""

from chunkc.scenarios.models import Transformer
from chunkc.scenarios.models.transformer import Head

TINY_GPT = Transformer(
    "gpt-tiny",
    {"model_type": "gpt2", "vocab_size": 101, "n_positions": 16, "n_layer": 2, "n_embd": 32, "n_head": 2}
    | {"bos_token_id": 0, "eos_token_id": 0}
    | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    Head.CAUSAL,
)
TINY_LLAMA = Transformer(
    "llama-tiny",
    {"model_type": "llama", "vocab_size": 104, "max_position_embeddings": 16, "num_hidden_layers": 2}
    | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True},
    Head.CAUSAL,
)
TINY_BERT = Transformer(
    "bert-tiny",
    {"model_type": "bert", "vocab_size": 101, "max_position_embeddings": 16, "num_hidden_layers": 2}
    | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    Head.CLASSIFICATION,
)
TINY_QWEN3 = Transformer(
    "qwen3-tiny",
    {**TINY_LLAMA.config, "model_type": "qwen3", "head_dim": 8},
    Head.CAUSAL,
)
TINY_GEMMA3 = Transformer(
    "gemma3-tiny",
    {**TINY_LLAMA.config, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8},
    Head.CAUSAL,
)
