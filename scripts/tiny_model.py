"""Write a tiny Llama that any vLLM loads in a second: for tests, benchmarks and the demo.

    .venv-engine/bin/python scripts/tiny_model.py DIR [--layers 4]

3.1 million float32 parameters, a byte-level tokenizer of 1,024 tokens, a chat template. The weights
are random but always the same, so that greedy outputs are equal everywhere. Generated text has no
meaning and ends by length: generation_config.json has no end token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN = 256
LAYERS = 4
HEADS = 8
KV_HEADS = 4
INTERMEDIATE = 688
VOCABULARY = 1024
POSITIONS = 16_384
SEED = 20_240_607

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = (
    "Fleetkeeper keeps a fleet of engines: each engine serves sequences in batches, step by step.",
    "Queue wait is the time from arrival to the first schedule; batch time is the time of one step.",
    "When the queue grows and a batch has room, the batch grows; when it has none, replicas are added.",
    "A request has a prompt, and a prompt has tokens; the cache holds keys and values of each token.",
)


def config(layers: int = LAYERS) -> dict[str, object]:
    """Return the model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
    }


def weights(layers: int = LAYERS) -> dict[str, np.ndarray]:
    """Return every tensor by name, float32, drawn with a fixed seed."""
    draw = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * 0.02).astype(np.float32)

    kv = KV_HEADS * (HIDDEN // HEADS)
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{name}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(kv, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(kv, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{name}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return tensors


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE: every text has tokens, and every token has text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    missing = VOCABULARY - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f" token{index}" for index in range(missing)])
    tokenizer.save(str(directory / "tokenizer.json"))


def write(directory: Path, layers: int = LAYERS) -> None:
    """Write the whole model, readable by everyone because pods run as other users."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights(layers), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    documents = {
        "config.json": config(layers),
        "generation_config.json": {"bos_token_id": 0, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": POSITIONS,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in documents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    for path in directory.iterdir():
        path.chmod(0o644)


def main() -> None:
    """Parse the arguments and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS, help="more layers make longer steps")
    given = parser.parse_args()
    write(given.directory, given.layers)


if __name__ == "__main__":
    main()
