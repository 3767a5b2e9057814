"""Settings that `diloco preflight --search` finds, with a compiler that needs no seconds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_jax.cli import main as cli
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import parse, parse_text
from diloco_jax.tools.budget.memory import Hbm
from diloco_jax.tools.preflight import search as searching
from diloco_jax.tools.preflight.compile import Built, Compiled, Memory
from diloco_jax.tools.preflight.hlo import Collective, Program, Tensor
from diloco_jax.tools.preflight.judge import cases_of
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.models.options import DecoderConfig
from tests.tools.preflight.test_judge import DECODER

# 128 sequences of 128 tokens on each island, 8 sequences on a chip
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "islands": {"count": 3, "topology": "v6e:4x4", "mesh": {"fsdp": -1}},
    "train": {"batch_size": 384, "seq_len": 128},
    "model": {"args": DECODER},
    "protocol": {"sync_every": 8, "num_fragments": 2, "overlap_steps": 2, "quorum": 1},
}  # fmt: skip
FLOPS = {"minimal": 100e12, "mlp": 120e12, "attention": 130e12, "full": 140e12}
# The sizes are for one micro-batch; a chip has 32 GB.
SIZES = {"minimal": 60e9, "mlp": 32e9, "attention": 27e9, "full": 20e9}


class Compiler:
    """A compiler whose programs take FLOPS and SIZES, and gather 4 GB per micro-batch, which chips wait for."""

    def __init__(self, larger: float = 1) -> None:
        self.larger = larger
        self.asked: list[tuple[str, int, int]] = []

    def __call__(self, config: RunConfig, island: IslandConfig, *_: Any, step_only: bool) -> Any:
        remat, count, fsdp = config.model.args["remat"], config.optimizer.accumulate_steps, island.mesh.fsdp
        self.asked.append((remat, count, fsdp))
        gather = Collective("all-gather", (Tensor("u8", (fsdp * 10**9 // 4,)),), count)
        program = Program(FLOPS[remat], (gather,), (), 16, 0, ())
        memory = Memory(0, 0, 0, self.larger * SIZES[remat] / count, 0)
        blueprint = Blueprint(config.model, config.optimizer, island.mesh, 16, seed=0)
        return Compiled(blueprint, None, Hbm(*[0] * 6), (Built("step", (), 0, 0, memory, program, 0),))  # type: ignore


def searched(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler, record: Path, compiles: int = 100, **islands: Any
) -> tuple[RunConfig, dict[str, Any], list[str]]:
    """Return the config, what came out, and what was told meanwhile."""
    monkeypatch.setattr(searching, "compile_island", compiler)
    config = parse({**SETTINGS, "islands": {**SETTINGS["islands"], **islands}}, "test")
    [(there, kind)] = cases_of(config, [])
    told = list[str]()
    return there, searching.search(there, kind, compiles, record, told.append), told


def test_the_cheapest_that_fits_is_taken_and_nothing_is_compiled_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, record = Compiler(), tmp_path / "found"
    there, first, told = searched(monkeypatch, compiler, record, 4)
    # more micro-batches are tried only with policies that compute less than the one that fitted
    assert compiler.asked == [("minimal", 1, 16), ("mlp", 1, 16), ("attention", 1, 16), ("minimal", 2, 16)]
    assert first["left"] and first["ok"] and "candidates remain: run it again" in searching.describe_search(first)
    assert "remat minimal, mesh fsdp 16, accumulate_steps 1: program 1 of at most 4" in told
    # a chip of 918 TFLOP/s, links of 400 GB/s
    assert first["best"]["seconds"] == pytest.approx(130 / 918 + 4 / 400)
    there, second, _ = searched(monkeypatch, compiler, record)
    # With four micro-batches the policy fits that computes least, so eight are not tried. On other meshes gathers are
    # smaller: what did not fit is not tried there, nor what takes longer by its FLOPs alone than the best so far.
    assert compiler.asked[4:] == [
        ("mlp", 2, 16), ("minimal", 4, 16), ("attention", 1, 4), ("mlp", 2, 4), ("minimal", 4, 4), ("minimal", 4, 1)
    ]  # fmt: skip
    best, said = second["best"], searching.describe_search(second)
    assert (best["remat"], best["accumulate_steps"], best["mesh"]["fsdp"]) == ("minimal", 4, 1)
    assert "too large" in said and not second["left"]
    assert said.splitlines()[-1].startswith("cheapest: remat minimal, mesh data 16, accumulate_steps 4")
    written = parse_text(searching.best_config(there, best), "written")
    assert (written.model.args["remat"], written.optimizer.accumulate_steps) == ("minimal", 4)
    assert (written.islands.mesh.data, written.islands.mesh.fsdp) == (16, 1)
    same = replace(there, model=replace(there.model, args=dict(reversed(there.model.args.items()))))
    searching.search(same, cases_of(same, [])[0][1], 100, record, told.append)
    assert len(compiler.asked) == 10, "the order of settings in a config does not matter"


def test_what_cannot_fit_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(larger=1e-4)
    small = {"v9": {"dims": 2, "chips_max": 256, "peak_tflops": 1000, "hbm_gb": 0.005, "host_gb": 720}}
    _, result, _ = searched(monkeypatch, compiler, tmp_path / "found", topology="v9:4x4", generations=small)
    least = result["tried"][0]
    # of each token and layer in bfloat16: what goes in, attention, queries, keys and values, out, gate and up
    token = 2 * 2 * (128 + 128 + 128 + 128 + 128 + 2 * 256)
    assert (least["remat"], least["accumulate_steps"], least["flops"]) == ("minimal", 1, 0)
    assert least["hbm"]["temporaries"] == 8 * 128 * token and least["hbm"]["parameters"] > 0
    assert compiler.asked[0] == ("mlp", 1, 16)
    assert f">= {least['hbm_bytes'] / 1e9:.1f} GB" in searching.describe_search(result)


def test_it_says_what_to_change_if_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, result, _ = searched(monkeypatch, Compiler(larger=20), tmp_path / "found")
    said = searching.describe_search(result)
    assert not result["ok"] and result["best"] is None and not result["left"]
    assert "nothing fits into 28.8 GB" in said and "islands.mesh.tensor 2" in said


def test_a_file_other_than_a_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
    assert cli.main(["preflight", str(path), "--search", str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert "not a file of a search's results; name another one" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(("topology", "seq_len", "block"), [("v5p:2x2x1", 2048, 1024), ("v6e:2x2", 384, 128)])
def test_tiles_of_the_kernel(topology: str, seq_len: int, block: int) -> None:
    decoder = DecoderConfig(head_dim=256)
    assert searching.best_block(decoder, seq_len, Topology.parse(topology)) == block
