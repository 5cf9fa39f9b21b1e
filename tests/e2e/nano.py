"""k3-nano as a served model folder: random weights, so any wrong byte anywhere changes the tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/k3"
SPECIALS = ["[PAD]", "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]


def nano_folder(target: Path) -> Path:
    """Write the model folder: golden config and weights, byte tokenizer, the embedded model's chat format."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDEN / "config.json", target / "config.json")
    shutil.copy(GOLDEN / "model.safetensors", target / "model.safetensors")
    chat = json.loads((ROOT / "k3/assets/tiny/chat_format.json").read_text())
    chat["tokenizer"] = {
        "kind": "bytes",
        "special_slots": 256,
        "specials": {name: i for i, name in enumerate(SPECIALS)},
    }
    (target / "chat_format.json").write_text(json.dumps(chat))
    return target
