"""Writes a model small enough to serve in a test as a GGUF file: random weights and a vocabulary of bytes.

Standard library only: `python tiny_gguf.py FILE`. The format is that of GGUF version 3. What the model says is noise,
which is fine: the tests look at how the engine moves, not at what it writes.
"""

from __future__ import annotations

import random
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

CONTEXT = 32768
LAYERS = 6
WIDTH = 64
HEADS = 2
FEED_FORWARD = 128

ALIGNMENT = 32
F32 = 0
U32, FLOAT, STRING, ARRAY, I32 = 4, 6, 8, 9, 5
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6

# A token per byte, so that any text can be told, and a blank.
TOKENS = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
TOKENS += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
TOKENS += [("\u2581", NORMAL)]


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def listing(key: str, kind: int, items: list[bytes]) -> bytes:
    return entry(key, ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(items))


def metadata() -> list[bytes]:
    return [
        entry("general.architecture", STRING, text("llama")),
        entry("general.name", STRING, text("tiny")),
        number("llama.context_length", CONTEXT),
        number("llama.embedding_length", WIDTH),
        number("llama.block_count", LAYERS),
        number("llama.feed_forward_length", FEED_FORWARD),
        number("llama.attention.head_count", HEADS),
        number("llama.attention.head_count_kv", HEADS),
        number("llama.rope.dimension_count", WIDTH // HEADS),
        number("llama.vocab_size", len(TOKENS)),
        entry("llama.attention.layer_norm_rms_epsilon", FLOAT, struct.pack("<f", 1e-5)),
        entry("tokenizer.ggml.model", STRING, text("llama")),
        listing("tokenizer.ggml.tokens", STRING, [text(token) for token, _ in TOKENS]),
        listing("tokenizer.ggml.scores", FLOAT, [struct.pack("<f", 0.0)] * len(TOKENS)),
        listing("tokenizer.ggml.token_type", I32, [struct.pack("<i", kind) for _, kind in TOKENS]),
        number("tokenizer.ggml.unknown_token_id", 0),
        number("tokenizer.ggml.bos_token_id", 1),
        number("tokenizer.ggml.eos_token_id", 2),
    ]


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, the row's length first."""
    yield "token_embd.weight", (WIDTH, len(TOKENS))
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (WIDTH,)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{block}.{part}.weight", (WIDTH, WIDTH)
        yield f"{block}.ffn_norm.weight", (WIDTH,)
        yield f"{block}.ffn_gate.weight", (WIDTH, FEED_FORWARD)
        yield f"{block}.ffn_up.weight", (WIDTH, FEED_FORWARD)
        yield f"{block}.ffn_down.weight", (FEED_FORWARD, WIDTH)
    yield "output_norm.weight", (WIDTH,)
    yield "output.weight", (WIDTH, len(TOKENS))


def padding(length: int) -> bytes:
    return b"\0" * (-length % ALIGNMENT)


def write(path: Path) -> None:
    """Write the model, 1 MB; the same bytes every time."""
    weights = random.Random(0)
    described, data = bytearray(), bytearray()
    shapes = list(tensors())
    for name, shape in shapes:
        described += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, F32, len(data))
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [1.0] * count if len(shape) == 1 else [weights.gauss(0.0, 0.05) for _ in range(count)]
        data += array("f", values).tobytes()
        data += padding(len(data))
    pairs = metadata()
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(pairs)) + b"".join(pairs) + described
    path.write_bytes(head + padding(len(head)) + data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
