"""Model folders that no router can serve: a ModelError (exit code 3) that names the file, never another exception."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3.errors import ModelError
from router.text.folder import load_model_folder

TINY = Path(__file__).parents[2] / "k3" / "assets" / "tiny"
FILES = ("config.json", "chat_format.json", "generation_config.json", "tiktoken.model")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in FILES:
        if (TINY / name).exists():
            shutil.copy(TINY / name, tmp_path)
    return tmp_path


def test_the_whole_folder_is_taken(model: Path) -> None:
    assert load_model_folder(model, "m").vocab_size > 256


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_bytes(b"\xff\x00" * 50),
        lambda path: (path.unlink(missing_ok=True), path.mkdir()),
    ],
    ids=["cut", "list", "noise", "folder"],
)
def test_a_spoilt_file_is_named(model: Path, name: str, spoil: Callable[[Path], object]) -> None:
    spoil(model / name)
    with pytest.raises(ModelError, match=name):
        load_model_folder(model, "m")


@pytest.mark.parametrize("name", ["config.json", "chat_format.json", "tiktoken.model"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelError, match=name):
        load_model_folder(model, "m")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"temperature": "hot"}', "temperature"),
        ('{"temperature": -1}', "temperature"),
        ('{"temperature": 3}', "temperature"),
        ('{"eos_token_id": "end"}', "eos_token_id"),
        ('{"eos_token_id": [1, 1000000]}', "eos_token_id"),
        ('{"eos_token_id": true}', "eos_token_id"),
    ],
)
def test_generation_defaults_that_no_request_may_have_are_refused(
    model: Path, text: str, field: str
) -> None:
    (model / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=field):
        load_model_folder(model, "m")
