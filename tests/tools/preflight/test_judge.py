"""Programs compiled for TPU slices that are not there, and what is said about them."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml
from jax.sharding import NamedSharding, PartitionSpec

from diloco_jax.cli import main as cli
from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import parse
from diloco_jax.tools.budget.memory import Hbm
from diloco_jax.tools.preflight import compile as compiling
from diloco_jax.tools.preflight import judge as judging
from diloco_jax.tools.preflight.compile import Built, Compiled, Gathers, Memory, slice_devices, weight_gathers
from diloco_jax.tools.preflight.hlo import Program, read_program
from diloco_jax.tools.preflight.judge import Misfit, advise_anchors, advise_hbm
from diloco_jax.tools.preflight.report import describe
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.flops import model_flops
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig, make_mesh
from tests.runtime.helpers import call

# The compiler for TPUs is libtpu.
NEEDS_COMPILER = pytest.mark.extra("dev")

DECODER = {
    "dim": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "mlp_dim": 256, "vocab_size": 512,
    "seq_len_max": 128, "scan_layers": True, "dtype": "bfloat16",
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "islands": {
        "count": 3, "topology": "v6e:4x4", "mesh": {"fsdp": -1},
        "each": {"island-1": {"topology": "v5p:2x2x1", "batch_size": 4}},
    },
    "train": {"batch_size": 48, "seq_len": 128},
    "model": {"args": DECODER},
    "protocol": {"sync_every": 8, "num_fragments": 2, "overlap_steps": 2, "quorum": 1},
}  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    """A config file; a change is merged into its section."""
    sections = {key: {**SETTINGS[key], **value} if key in SETTINGS else value for key, value in changes.items()}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, **sections}), encoding="utf-8")
    return path


def preflight(config: Path) -> dict[str, Any]:
    """Return what the command prints."""
    result = call("preflight", config, "--json")
    assert result.returncode == 0, result.stderr
    assert "inner step" in result.stderr, "nobody was told what takes so long"
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compile for islands of one kind."""
    return preflight(write(tmp_path_factory.mktemp("preflight"), islands={"each": {}}))


def check(compiled: dict[str, Any]) -> None:
    """Check the programs of each kind of island."""
    assert compiled["ok"] and not compiled["problems"]
    for island in compiled["islands"]:
        rows = [row for row in compiled["rows"] if row["topology"] == island["topology"]]
        assert {row["program"].split()[0] for row in rows} == {"create", "step", "stage", "adopt"}
        staged = [number for row in rows if row["program"].startswith("stage") for number in row["fragments"]]
        assert sorted(staged) == [0, 1]
        assert all(row["fits"] and 0 < row["hbm_bytes"] < row["hbm_limit_bytes"] for row in rows)
        assert 0.7 <= island["flops_ratio"] <= 1.0
        # nothing is computed again here, so all that the formula leaves out is the masked half of attention
        everything = island["model_flops"] + island["masked_flops"]
        assert island["compiled_flops"] == pytest.approx(everything, rel=0.02)
        assert not island["unread_loops"]
    for row in compiled["rows"]:
        # Only the inner step has collectives.
        assert bool(row["collectives"]) == (row["program"] == "step"), row
        assert not row["host_transfers"]


@NEEDS_COMPILER
def test_programs_are_those_that_an_island_needs(compiled: dict[str, Any]) -> None:
    assert [(each["topology"], each["islands"]) for each in compiled["islands"]] == [
        ("v6e:4x4", ["island-0", "island-1", "island-2"])
    ]
    check(compiled)


@NEEDS_COMPILER
@pytest.mark.long
def test_each_kind_of_island_is_compiled_once(tmp_path: Path) -> None:
    found = preflight(write(tmp_path))
    assert [(each["topology"], each["islands"]) for each in found["islands"]] == [
        ("v6e:4x4", ["island-0", "island-2"]),
        ("v5p:2x2x1", ["island-1"]),
    ]
    check(found)


@NEEDS_COMPILER
def test_what_an_island_holds(compiled: dict[str, Any]) -> None:
    island = compiled["islands"][0]
    size = island["parameters"]
    sharded = 4 * size / island["chips"]
    hbm = island["hbm"]
    assert hbm["parameters"] == pytest.approx(sharded, rel=0.05)  # norms are replicated
    assert hbm["optimizer"] == pytest.approx(2 * sharded, rel=0.05)
    assert hbm["anchors"] >= 0.95 * sharded
    assert island["host_bytes"] >= 4 * size
    up = island["wire"]["up_bytes_per_step"]
    # Codes are int4 with scales, and each fragment travels once in 8 steps.
    assert 0.5 * size / 8 < up < 0.6 * size / 8


@NEEDS_COMPILER
def test_report_for_people(compiled: dict[str, Any]) -> None:
    # As if there were an island of another kind, with the same programs.
    [island] = compiled["islands"]
    islands = [{**island, "islands": ["island-0", "island-2"]}]
    islands.append({**island, "islands": ["island-1"], "topology": "v5p:2x2x1"})
    rows = [{**row, "topology": each["topology"]} for each in islands for row in compiled["rows"]]
    text = describe({**compiled, "islands": islands, "rows": rows})
    for words in ("2 islands, island-0 to island-2", "v5p:2x2x1   island-1", "all-gather", "everything fits"):
        assert words in text
    assert len(text.splitlines()) < 60


def test_a_program_that_fragments_share_is_described_once() -> None:
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    exchange = SimpleNamespace(programs=lambda fragments: [("stage", each, compiled) for each in fragments])
    blueprint: Any = SimpleNamespace(exchange=lambda *_: exchange)
    fragments: Any = [SimpleNamespace(fragment_id=number) for number in (3, 5)]
    [built] = compiling.exchange_programs(parse(SETTINGS, "test"), blueprint, fragments)
    assert (built.name, built.fragments) == ("stage 3", (3, 5)) and built.compiler_flops > 0


@NEEDS_COMPILER
def test_flops_of_a_scan_on_a_slice() -> None:
    mesh = make_mesh(MeshConfig(fsdp=-1), slice_devices(Topology.parse("v5p:2x2x1")))
    spread = NamedSharding(mesh, PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=spread)
    w = jax.ShapeDtypeStruct((5, 256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    def layers(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0]

    program = read_program(jax.jit(layers).lower(x, w).compile().as_text())
    assert program.matrix_flops * 4 == 5 * 2 * 512 * 256 * 256
    assert program.collective_counts == {}


def test_model_flops_by_hand() -> None:
    args = {"dim": 8, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_dim": 16}
    args |= {"vocab_size": 10}
    # The terms are q, k and v, the output, and the MLP.
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    found = model_flops(ModelConfig(args=args), {}, batch=5, seq_len=7)
    # Per token and layer: q k^T and the mixing of v, with 2 heads of 4, unmasked.
    scores = 2 * 2 * 7 * 2 * 4
    assert found.flops == 3 * 5 * 7 * (2 * (3 * layer + 80) + 3 * scores / 2)
    assert found.masked == 3 * 5 * 7 * 3 * scores / 2
    mixture = {**args, "num_experts": 4, "experts_per_token": 2}
    found = model_flops(ModelConfig(module="diloco_jax.training.models.moe:MoeDecoder", args=mixture), {}, 5, 7)
    # A sparse layer adds a second expert and the router.
    sparse = layer + 3 * 8 * 16 + 8 * 4
    assert found.flops == 3 * 5 * 7 * (2 * (3 * sparse + 80) + 3 * scores / 2)
    # In layers 1 and 2 a token sees 4 - 4^2 / (2 x 7) others instead of 7 / 2.
    args |= {"window": 4, "global_every": 3}
    found = model_flops(ModelConfig(args=args), {}, 5, 7)
    seen = scores / 7 * (2 * (4 - 16 / 14) + 3.5)
    assert found.flops == pytest.approx(3 * 35 * (2 * (3 * layer + 80) + seen))
    assert found.masked == pytest.approx(3 * 35 * (3 * scores - seen))
    other = model_flops(ModelConfig(module="my.models:Net"), {"a": (3, 4), "b": (5,)}, batch=5, seq_len=7)
    assert other.flops == 6 * 35 * 17


NOTHING = Memory(0, 0, 0, 0, 0)
# Both messages of libtpu start with this text.
REFUSED = "RESOURCE_EXHAUSTED: Ran out of memory "


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("message", "gigabytes"),
    [
        ("on HBM, the total memory required for HLO temporaries (84.00G) exceeds available HBM (31.25G).", 90.2),
        ("in memory space hbm. Used 49.50G of 31.25G hbm. Exceeded hbm capacity by 18.25G.", 53.2),
    ],
)
def test_what_does_not_fit_names_settings(
    message: str, gigabytes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError(REFUSED + message)

    real = compiling.build

    def build(kind: str, *rest: Any) -> Built:
        done = Built(kind, (), 0.0, 0.0, NOTHING, Program(0.0, (), (), 4, 0, ()), 0.0)
        return real(kind, *rest) if kind == "step" else done

    monkeypatch.setattr(Blueprint, "lower_step", refuse)
    monkeypatch.setattr(compiling, "exchange_programs", lambda *_: [])
    monkeypatch.setattr(compiling, "build", build)
    model = {"args": {**DECODER, "dtype": "float32"}}
    path = write(tmp_path, model=model, islands={"count": 1, "each": {}, "topology": "v6e:2x2"})
    assert cli.main(["preflight", str(path)]) == 1
    said = capsys.readouterr().out
    assert f"'step' needs {gigabytes:.1f} GB of a chip's memory, which has 32 GB; the compiler refuses it" in said
    advised = ("model.args.remat full", "model.args.dtype bfloat16", "islands.batch_size (now 12 sequences")
    assert all(words in said for words in (*advised, "does not fit as it is"))


def situation(mesh: dict[str, int], sequences: float, fixed: float, temporaries: float, **args: Any) -> Misfit:
    hbm = Hbm(fixed / 3, fixed * 2 / 3, 0, 0, 0, temporaries)
    model = ModelConfig(args={**DECODER, "remat": "full", **args})
    return Misfit(Topology.parse("v6e:1x1" if mesh == ALONE else "v6e:4x4"), mesh, sequences, model, hbm)


SHARDED, COPIED = {"data": 1, "fsdp": 16, "tensor": 1}, {"data": 16, "fsdp": 1, "tensor": 1}
ALONE = {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("mesh", "sequences", "fixed", "temporaries", "args", "words"),
    [
        (COPIED, 1, 40e9, 1e9, {}, ["islands.mesh.fsdp to 16", "2.5 GB"]),
        (SHARDED, 1, 40e9, 1e9, {}, ["larger islands", "islands.topology v6e:8x8"]),
        (SHARDED, 4, 2e9, 40e9, {}, ["optimizer.accumulate_steps", "islands.batch_size (now 4 sequences"]),
        (SHARDED, 1, 2e9, 40e9, {}, ["islands.mesh.tensor 2"]),
        (SHARDED, 4, 2e9, 40e9, {"dtype": "float32", "remat": "none"}, ["dtype bfloat16", "remat full"]),
        (SHARDED, 1, 2e9, 40e9, {"vocab_size": 65536}, ["model.args.loss_chunk"]),
        (SHARDED, 1, 4e12, 0, {}, ["no v6e slice is large enough"]),
        # The next slice after one chip has four.
        (ALONE, 1, 20e9, 1e9, {}, ["v6e:2x2 "]),
    ],
)
def test_advice(
    mesh: dict[str, int], sequences: float, fixed: float, temporaries: float, args: dict[str, Any], words: list[str]
) -> None:
    said = " ".join(advise_hbm(situation(mesh, sequences, fixed, temporaries, **args)))
    for word in words:
        assert word in said


def test_anchors_that_are_not_shared_out() -> None:
    assert advise_anchors(Hbm(1e9, 2e9, 1.2e9, 0, 0, 0), SHARDED) == []
    assert "fragments.split_axis" in advise_anchors(Hbm(1e9, 2e9, 5e9, 0, 0, 0), SHARDED)[0]


def gathering(kind: str, blueprint: Blueprint, shape: str, times: int = 1) -> Gathers:
    text = (
        "HloModule m, num_partitions=4\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"
        f"  %a = f32[8]{{0}} parameter(0)\n  ROOT %g = bf16[{shape}]{{0}} {kind}(%a)\n}}\n"
    )
    program = read_program(text)
    program = program._replace(collectives=tuple(each._replace(times=times) for each in program.collectives))
    return weight_gathers(Built("step", (), 1.0, 1.0, NOTHING, program, 0.0), blueprint)


def test_gathers_of_weights_are_told_from_others() -> None:
    def blueprint(mesh: MeshConfig) -> Blueprint:
        return Blueprint(ModelConfig(args=DECODER), OptimizerConfig(), mesh, jax.devices()[:4], seed=0)

    sharded = blueprint(MeshConfig(fsdp=4))
    for kind, reduces in (("all-gather", 0), ("all-reduce", 1)):
        layer, all_layers = gathering(kind, sharded, "1,128,256"), gathering(kind, sharded, "2,128,256")
        assert layer.largest is not None and layer.largest.elements == 128 * 256
        assert (layer.stacked_elements, all_layers.stacked_elements) == (0, 2 * 128 * 256)
        assert (layer.all_reduces, layer.waited_for) == (reduces, 0)
        assert gathering(kind, sharded, "1,128,256", 26).waited_for == 26, "in a loop"
        assert gathering(kind, sharded, "48,128,128,7").largest is None, "activations"
    copied = blueprint(MeshConfig(data=4))
    assert gathering("all-reduce", copied, "2,128,256").largest is None, "gradients of whole weights"


def test_a_collective_in_staging_is_a_problem() -> None:
    text = (
        "HloModule m, num_partitions=16\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"
        "  %a = f32[8]{0} parameter(0)\n  ROOT %g = f32[8]{0} all-reduce(%a), to_apply=%add\n}\n"
    )
    built = Built("stage", (3,), 1.0, 1.0, NOTHING, read_program(text), 0.0)
    found = judging.program_problems(Topology.parse("v6e:4x4"), [built])
    assert len(found) == 1 and "'stage 3' has collectives (1 all-reduce)" in found[0]
    other = judging.program_problems(Topology.parse("v6e:4x8"), [built._replace(kind="step", fragments=())])
    assert len(other) == 1 and "runs on 16 devices, but an island has 32" in other[0]


def test_slices_in_place_of_the_islands_own() -> None:
    cases = judging.cases_of(parse(SETTINGS, "test"), ["v5p:2x2x1", "v6e:2x2"])
    found = [(kind.island.topology, kind.island.batch_size, kind.names) for _, kind in cases]
    assert found == [
        ("v5p:2x2x1", 16, ("island-0", "island-2")),
        ("v5p:2x2x1", 4, ("island-1",)),
        ("v6e:2x2", 16, ("island-0", "island-2")),
        ("v6e:2x2", 4, ("island-1",)),
    ]
    assert Topology.parse("v6e:2x4").host_bytes == 2 * Topology.parse("v6e:2x2").host_bytes
    assert Topology.parse("v5p:4x4x8").host_bytes == pytest.approx(448e9)


def test_gpus_beside_slices_are_reported_as_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"topology": "", "devices": 4, "accelerator": "H100", "mesh": {"data": -1}}
    each = {"island-1": own, "island-2": {"topology": "v6e:2x2"}}
    islands = {"count": 3, "topology": "v5p:2x2x1", "each": each}
    config = parse({**SETTINGS, "islands": islands}, "test")
    assert [kind.names for _, kind in judging.cases_of(config, [])] == [("island-0",), ("island-2",)]
    monkeypatch.setattr(judging, "cases_of", lambda *_: [])
    found = judging.preflight(config, [], print)["not_compiled"]
    assert [(each["islands"], each["on"]) for each in found] == [(["island-1"], "4 GPUs (H100)")]
    assert not judging.preflight(config, ["v6e:2x2"], print)["not_compiled"], "all islands move to that slice"


NOWHERE: dict[str, Any] = {"topology": "", "each": {}}


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"islands": NOWHERE}, [], ["names no TPU slice", "--topology v5p:2x2x1"]),
        ({}, ["--topology", "v3:2x2x1"], ["no generation 'v3'"]),
        ({"islands": {**NOWHERE, "mesh": {"fsdp": 3}}}, ["--topology", "v6e:4x4"], ["does not fit 16"]),
        ({"islands": {**NOWHERE, "batch_size": 7}}, ["--topology", "v6e:4x4"], ["batch of 7"]),
    ],
)
def test_wrong_input(
    changes: dict[str, Any], arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["preflight", str(write(tmp_path, **changes)), *arguments]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert len(said.strip().splitlines()) == 1


def test_without_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "libtpu" else real(name, *rest)
    )
    assert cli.main(["preflight", str(write(tmp_path))]) == 2
    said = capsys.readouterr().err
    assert "pip install -e '.[tpu]'" in said and len(said.strip().splitlines()) == 1


@NEEDS_COMPILER
@pytest.mark.long
def test_a_slice_compiles_the_gradient_of_its_part_and_the_update(tmp_path: Path) -> None:
    path = write(tmp_path, islands={"count": 3, "topology": "v6e:2x2", "each": {}, "slices": 2})
    result = call("preflight", path, "--json")
    assert result.returncode == 0 and "slice's part of 8 sequences" in result.stderr, result.stderr
    found = json.loads(result.stdout)
    assert {row["program"].split()[0] for row in found["rows"]} == {"create", "gradient", "update", "stage", "adopt"}
    (island,) = found["islands"]
    assert (island["slices"], island["batch_size"], island["part_size"]) == (2, 16, 8)
    everything = island["model_flops"] + island["masked_flops"]
    # The step of one process with a batch of 8 has the same FLOPs, 2.6 % above the model's.
    assert island["compiled_flops"] == pytest.approx(everything, rel=0.03)
    # A mean of two gradients in float32, whole on the only host of a slice: a half, twice, each way.
    assert island["exchange"]["bytes"] == 2 * 0.5 * 4 * island["parameters"]
    assert island["hbm"]["mean_gradient"] == island["hbm"]["parameters"]


def test_the_memory_of_a_part_and_of_an_update() -> None:
    held = Hbm(10.0, 20.0, 10.0, 5.0, 2.0, 0.0, 0.0, 3.0, 10.0)
    program = Program(0.0, (), (), 4, 0, ())
    # Arguments are the parameters, and outputs the gradient; then the state and the mean, which updates the state.
    gradient = Built("gradient", (), 1.0, 1.0, Memory(10.0, 10.0, 0.0, 50.0, 1.0), program, 0.0)
    update = Built("update", (), 1.0, 1.0, Memory(40.0, 31.0, 30.0, 4.0, 1.0), program, 0.0)
    compiled = Compiled(None, None, held, (gradient, update))  # type: ignore[arg-type]
    hbm = compiling.step_hbm(compiled)
    assert hbm.temporaries == 10 + 50 + 1
    fixed = 10 + 20 + 10 + 5 + 2 + 3 + 10
    assert compiling.program_hbm(gradient, compiled, hbm) == fixed + 61
    assert compiling.program_hbm(update, compiled, hbm) == fixed + 4 + 1 + 31 - 30
