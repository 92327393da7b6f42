"""Makes a model small enough to serve in a test: two megabytes of random weights and a tokenizer of its own.

Runs under the Python of the real engine's environment: `python tiny_model.py DIRECTORY`. Nothing is downloaded. What it
says is noise, which is fine: the tests look at how the engine moves, not at what it writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_POSITIONS = 32768
"""Long enough for a prompt whose prefill outlasts any stall threshold that the tests use."""

LINES = [
    "The kubelet asks whether the engine is hung, and the engine says that it is well.",
    "A long prefill moves no counter; only the share of the cache in use rises, block by block.",
    "0 1 2 3 4 5 6 7 8 9 prefill decode rank core canary scrape exposition stall warm-up",
]


def main(directory: Path) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(LINES, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=MAX_POSITIONS,
    ).save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,  # steps slow enough that the API server keeps up with its core on two busy cores
        num_attention_heads=2,  # of 32 each: the smallest that vLLM's CPU attention takes
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
