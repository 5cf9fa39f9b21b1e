"""k3-nano as a served model folder: random weights, so any wrong byte anywhere changes the tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from k3.model.spec import K3Spec
from tests.random_weights import random_tensors, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/k3"
SPECIALS = ["[PAD]", "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]


def nano_folder(target: Path, context: int = 4096) -> Path:
    """Write the model folder: golden config and weights, byte tokenizer, the embedded model's chat format."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((GOLDEN / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = context
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / "model.safetensors", target / "model.safetensors")
    _write_chat_format(target)
    return target


def wide_nano_folder(target: Path, heads: int = 8, context: int = 8192) -> Path:
    """The same with more heads and a longer context, freshly drawn weights."""
    config = json.loads((GOLDEN / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    text["linear_attn_config"]["num_heads"] = heads
    text["max_position_embeddings"] = context
    save_checkpoint(target, config, random_tensors(K3Spec.from_config(config), seed=8))
    _write_chat_format(target)
    return target


def _write_chat_format(target: Path) -> None:
    chat = json.loads((ROOT / "k3/assets/tiny/chat_format.json").read_text())
    chat["tokenizer"] = {
        "kind": "bytes",
        "special_slots": 256,
        "specials": {name: i for i, name in enumerate(SPECIALS)},
    }
    (target / "chat_format.json").write_text(json.dumps(chat))
