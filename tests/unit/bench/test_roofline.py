"""`k3-bench roofline` on the real configuration: what it recommends, and how it refuses wrong input."""

import io
import json
from argparse import ArgumentParser
from pathlib import Path

import pytest
from rich.console import Console

from k3.bench import roofline
from k3.bench.cost import PRESETS, Load
from k3.errors import ConfigError

pytestmark = pytest.mark.helix

REAL = Path(__file__).parents[3] / "docs" / "examples" / "kimi-k3-config.json"


def run(*flags: str) -> tuple[int, str]:
    p = ArgumentParser()
    roofline.add_arguments(p)
    out = Console(file=io.StringIO(), width=200)
    code = roofline.run(p.parse_args(["--model", str(REAL), *flags]), out)
    assert isinstance(out.file, io.StringIO)
    return code, out.file.getvalue()


def best(batch: int, context: int, drafts: int = 0) -> int:
    sizes = roofline.sizes_of(REAL)
    load = Load(batch, context, drafts)
    found = roofline.recommended(
        roofline.choices(sizes, PRESETS["h200_nvlink"], 16, load, "value", 64)
    )
    assert found is not None
    return found.layout.cp


def test_short_contexts_stay_tensor_parallel_and_long_ones_do_not() -> None:
    assert best(1, 2048) == 1
    assert best(8, 131072) > 1
    assert best(1, 1 << 20) > 1


def test_long_groups_of_drafts_ask_for_less_context_parallelism() -> None:
    assert best(1, 100_000, 7) <= best(1, 100_000, 0)


def test_the_table_marks_the_recommended_mesh_and_names_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    code, text = run("--batch", "8", "--draft", "7", "--json", str(file))
    assert code == 0
    assert "recommended: parallel.tp=" in text
    assert "tokens per request" in text
    figures = json.loads(file.read_text())
    assert [f["layout"]["cp"] for f in figures] == [1, 2, 4, 8, 16]
    (chosen,) = [f for f in figures if f["recommended"]]
    assert chosen["total"] == min(f["total"] for f in figures if f["fits"])


def test_weights_that_do_not_fit_are_said() -> None:
    code, text = run("--gpus", "8", "--context", "1000", "--batch", "1")
    assert code == 1
    assert "no mesh holds" in text


def test_a_number_of_ranks_that_divides_no_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus 5.*96 heads"):
        run("--gpus", "5")


def test_hardware_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hw.json"
    file.write_text('{"mem_bw": 1e12, "flops": 1e14, "link_bw": 1e10, "latency": 1e-5}')
    code, text = run("--hardware", str(file))
    assert code == 0
    assert "holds" in text


@pytest.mark.parametrize("text", ['{"mem_bw": 1}', "[]", "{", '{"speed": 3}'])
def test_a_wrong_hardware_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hw.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--hardware"):
        run("--hardware", str(file))
