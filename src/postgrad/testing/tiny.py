"""Tiny randomly initialised models and a byte-level tokenizer, for tests that need the real interfaces but not a real model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Architecture = Literal["llama", "qwen2", "qwen3", "gemma", "gpt2"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3", "gemma", "gpt2")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: ids 0–2 are `<|endoftext|>`, `<|im_start|>`, `<|im_end|>` (eos), then one id per byte and a few
    merges (so that tokens do merge across text boundaries)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġ", "a"), ("i", "n"), ("Ċ", "Ċ"), (")", "b"), ("1", "2"), ("Ġ", "1")]
    pieces = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.chat_template = chat_template
    return tokenizer  # type: ignore[no-any-return]


def tiny_model(
    architecture: Architecture = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 288,
    dropout: float = 0.0,
    scale: float = 0.2,
    **overrides: Any,
) -> PreTrainedModel:
    """A randomly initialised decoder of about 50 k parameters: 2 layers, width 32, 4 heads (2 key-value heads).

    `scale` is the standard deviation of the initial weights: large enough that attention is far from uniform.
    """
    import torch
    from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

    common: dict[str, Any] = {
        "vocab_size": vocab_size, "initializer_range": scale, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "use_cache": False,
    }  # fmt: skip
    llama_like = common | {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "attention_dropout": dropout, "tie_word_embeddings": True,
    }  # fmt: skip
    config: Any
    if architecture == "llama":
        config = LlamaConfig(**(llama_like | overrides))
    elif architecture == "qwen2":
        config = Qwen2Config(**(llama_like | overrides))
    elif architecture == "qwen3":
        config = Qwen3Config(**(llama_like | {"head_dim": 8, "tie_word_embeddings": False} | overrides))
    elif architecture == "gemma":
        config = GemmaConfig(**(llama_like | {"head_dim": 8} | overrides))
    else:
        gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
        config = GPT2Config(**(common | gpt2 | {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout} | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
        return model.float().eval()  # type: ignore[no-any-return]
