"""A PyTorch module as an island: names and layouts, what is copied, the optimizer's state, and what is refused."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment, plan_fragments, take
from diloco_jax.runtime.own_loop.lagging import LaggingMetrics
from diloco_jax.training.numpy_exchange.state import NumpyState
from diloco_jax.training.whole_state.staging import read_shards
from tests.extras import absent
from tests.limits import HANGS_S

pytest.importorskip("torch", reason=absent("parity"))

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from diloco_jax.adapters.torch.copies import as_tensor, fill, start_copy
from diloco_jax.adapters.torch.holder import TorchArrays, TorchHolder
from diloco_jax.adapters.torch.names import like_flax, placed_parameters, unwrapped

pytestmark = pytest.mark.extra("parity")
# Threads that wait for each other would cost more than these small arrays.
torch.set_num_threads(1)

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


class Small(nn.Module):
    """A table, tied to the last layer, a norm with running statistics, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 12, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.out(self.frozen(self.layers(self.embed(tokens))))
        return x


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


PATHS = {"embed/weight", *(f"layers/{n}/{name}" for n in range(3) for name in ("weight", "bias"))}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    for number in range(start, start + steps):
        tokens = torch.from_numpy(np.random.default_rng(number).integers(0, 12, 16))
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def state_of(holder: TorchHolder, format: codec.Format = "float32") -> tuple[NumpyState, tuple[Fragment, ...]]:
    arrays = TorchArrays(holder)
    state = arrays.exchanged(format, False)
    assert isinstance(state, NumpyState)
    return state, plan_fragments(arrays.shapes, 4, kinds=arrays.kinds).fragments


def saved(state: NumpyState) -> Any:
    shards = state.stage_shards()
    return read_shards(shards.shards, b"".join(bytes(codec.as_bytes(np.asarray(copy))) for copy in shards.copies))


@pytest.mark.parametrize("wrap", [lambda m: m, compiled, nn.DataParallel], ids=["plain", "compiled", "parallel"])
def test_trained_parameters_have_their_names_once_in_any_wrapper(wrap: Any) -> None:
    module = wrap(Small())
    holder = TorchHolder(module, [torch.optim.SGD(module.parameters())])
    assert set(holder.shapes) == PATHS
    assert holder.axes == {"embed/weight": ("vocab", None)}
    values = {path: np.full(shape, 2.0, np.float32) for path, shape in holder.shapes.items()}
    found = holder.tensors(values)
    # Both names of the tied table, so that loading a state_dict with them changes it.
    assert set(found) == {path.replace("/", ".") for path in PATHS} | {"out.weight"}
    inner = unwrapped(module)
    inner.load_state_dict({**inner.state_dict(), **found})
    assert all(bool((p == 2).all()) for p in inner.parameters() if p.requires_grad)


def test_an_inner_module_may_be_compiled() -> None:
    module = Small()
    module.layers[0] = compiled(module.layers[0])
    assert set(placed_parameters(module)) == PATHS


def test_a_module_in_distributed_data_parallel_of_one_process_keeps_its_names(tmp_path: Any) -> None:
    def use() -> None:
        module = DistributedDataParallel(Small())
        holder = TorchHolder(module, [optimizer := torch.optim.Adam(module.parameters())])
        assert set(holder.shapes) == PATHS
        assert len(train(module, optimizer, 2)) == 2

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        # The module must go before the group: if it is the group's last owner, its end waits for threads of the group
        # while it holds the interpreter's lock, and may wait forever.
        use()
    finally:
        torch.distributed.destroy_process_group()


def test_flax_has_other_names_and_transposed_kernels() -> None:
    module = nn.Sequential(nn.Embedding(5, 3), nn.Conv1d(3, 4, 2), nn.LayerNorm(4), nn.Linear(4, 2))
    holder = TorchHolder(module, [], names=like_flax(module))
    shapes = {"0/embedding": (5, 3), "1/kernel": (2, 3, 4), "1/bias": (4,), "2/scale": (4,), "2/bias": (4,)}
    assert holder.shapes == {**shapes, "3/kernel": (4, 2), "3/bias": (2,)}
    state, fragments = state_of(holder)
    kernel, weights = np.arange(8, dtype=np.float32).reshape(4, 2), module[3].weight
    values = {path: np.zeros(shape, np.float32) for path, shape in holder.shapes.items()} | {"3/kernel": kernel}
    for fragment in fragments:
        state.adopt(fragment, take(values, fragment))
    assert module[3].weight is weights and weights.tolist() == kernel.T.tolist()
    assert holder.tensors(values)["3.weight"].tolist() == kernel.T.tolist()
    weights.data += 1
    for fragment in fragments:
        found = codec.decode(state.stage(fragment).encode(), fragment.keys_shapes, "float32")
        for key, update in found.items():
            assert (update == (-1 if key.startswith("3/kernel") else 0)).all(), key


def test_only_the_pieces_of_a_fragment_are_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(40, 40, bias=False)
    holder = TorchHolder(module, [])
    state, fragments = state_of(holder)
    assert len(fragments) == 4
    sizes: list[int] = []

    def copied(tensor: torch.Tensor) -> Any:
        sizes.append(tensor.numel())
        return start_copy(tensor)

    def filled(tensor: torch.Tensor, value: Any) -> None:
        sizes.append(tensor.numel())
        fill(tensor, value)

    monkeypatch.setattr("diloco_jax.adapters.torch.holder.start_copy", copied)
    monkeypatch.setattr("diloco_jax.adapters.torch.holder.fill", filled)
    for fragment in fragments:
        sizes.clear()
        state.adopt(fragment, {key: np.zeros(shape, np.float32) for key, shape in fragment.keys_shapes})
        assert sum(sizes) == 400
        sizes.clear()
        staged = state.stage(fragment)
        # The next step changes the parameters in place before the copy is encoded.
        with torch.no_grad():
            module.weight.add_(1.0)
        assert sum(sizes) == 400
        (update,) = codec.decode(staged.encode(), fragment.keys_shapes, "float32").values()
        assert set(update.reshape(-1).tolist()) == {0.0}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_copies_have_the_bits_of_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    found = np.asarray(start_copy(tensor))
    assert found.shape == shape and (found.dtype == ml_dtypes.bfloat16) == (dtype == torch.bfloat16)
    assert torch.equal(as_tensor(found).clone(), tensor)
    found = found.copy()
    found.flags.writeable = False
    other = torch.zeros_like(tensor)
    fill(other, found)
    assert torch.equal(other, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_restores_a_loop_to_the_bit(optimizer: str, dtype: torch.dtype) -> None:
    make = OPTIMIZERS[optimizer]

    def fresh() -> tuple[Small, torch.optim.Optimizer, NumpyState, Any]:
        model = Small().to(dtype)
        first = make([p for p in model.parameters() if p.requires_grad])
        scheduler = torch.optim.lr_scheduler.MultiStepLR(first, [2, 4])
        before = copy.deepcopy(first.state_dict())
        state, _ = state_of(TorchHolder(model, [first], [scheduler]))
        assert str(first.state_dict()) == str(before), "attaching changes nothing"
        return model, first, state, scheduler

    def steps(model: Small, first: torch.optim.Optimizer, scheduler: Any, start: int) -> list[float]:
        return [_one(model, first, scheduler, start + n) for n in range(3)]

    model, first, state, scheduler = fresh()
    layout = state.state_layout
    steps(model, first, scheduler, 0)
    leaves = saved(state)
    following = steps(model, first, scheduler, 3)
    again, second, other, schedule = fresh()
    assert other.state_layout.leaves == layout.leaves, "the layout is known before the first step"
    other.check_shards(leaves)
    other.load_shards(leaves)
    assert steps(again, second, schedule, 3) == following
    assert schedule.get_last_lr() == scheduler.get_last_lr()
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
    for (name, mine), theirs in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def _one(model: Small, optimizer: torch.optim.Optimizer, scheduler: Any, number: int) -> float:
    (loss,) = train(model, optimizer, 1, start=number)
    scheduler.step()
    return loss


def test_a_state_taken_before_the_first_step_is_that_of_a_new_optimizer() -> None:
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state, _ = state_of(TorchHolder(model, [optimizer]))
    leaves = saved(state)
    want = train(model, optimizer, 3)
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state, _ = state_of(TorchHolder(model, [optimizer]))
    state.load_shards(leaves)
    assert train(model, optimizer, 3) == want
    names = set(state.state_layout.by_name)
    assert {"optimizer/embed/weight/exp_avg", "optimizer/layers/0/bias/step"} < names
    assert "other/buffers/layers/1/running_mean" in names
    assert not any("frozen" in name or "mask" in name for name in names)


def test_several_optimizers_are_numbered() -> None:
    model = Small()
    split = [[model.embed.weight], list(model.layers.parameters())]
    state, _ = state_of(TorchHolder(model, [torch.optim.SGD(split[0], momentum=0.9), torch.optim.Adam(split[1])]))
    names = set(state.state_layout.by_name)
    assert {"optimizer/0/embed/weight/momentum_buffer", "optimizer/1/layers/2/bias/exp_avg"} < names


def test_an_evaluation_gets_the_global_values_and_leaves_the_loop_as_it_was() -> None:
    model = Small()
    model.layers[0].eval()
    holder = TorchHolder(model, [])
    before, modes = copy.deepcopy(model.state_dict()), [inner.training for inner in model.modules()]
    seen: list[Any] = []

    def evaluate(module: nn.Module) -> float:
        seen.append((module is model, module.training, float(model.embed.weight.sum()), torch.is_grad_enabled()))
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        holder.evaluate(evaluate, {path: np.ones(shape, np.float32) for path, shape in holder.shapes.items()})
    assert seen == [(True, False, 72.0, False)]
    assert [inner.training for inner in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_metrics_are_tensors_or_numbers() -> None:
    arrays, lagging = TorchArrays(TorchHolder(Small(), [])), LaggingMetrics(waits=False)
    loss = torch.tensor(2.5, requires_grad=True) * 1
    assert lagging.take(arrays.metrics(loss)) == {"loss": 2.5}
    assert lagging.take(arrays.metrics({"loss": loss, "accuracy": 0.5})) == {"loss": 2.5, "accuracy": 0.5}
    with pytest.raises(ValueError, match="metric 'loss' is not a scalar"):
        lagging.take(arrays.metrics(torch.ones(3)))


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def buffered(table: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("table", table)
    return module


@pytest.mark.parametrize(
    ("module", "names", "words"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(False), None, "no parameter with requires_grad"),
        (lazy, None, "has no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), None, "on the meta device"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), None, "is torch.complex64; only float32"),
        (lambda: nn.Linear(2, 2), {"w": "a"}, "names has 'w', which is not a parameter"),
        (lambda: nn.Linear(2, 2), {"weight": ("a", (0, 0))}, r"has the axes \(0, 0\); list each of 0 to 1 once"),
        (lambda: nn.Linear(2, 2), {"weight": "a", "bias": "a"}, "'weight' and 'bias' have the one path 'a'"),
        (lambda: nn.Linear(2, 2), {"weight": 5}, r"names\['weight'\] is 5; give a path, or a path and a tuple"),
        (lambda: nn.Linear(2, 2), ["weight"], "names is a list; give a mapping"),
        (lambda: 3, None, "the module is a int; give a torch.nn.Module"),
        (lambda: buffered(torch.zeros(2, dtype=torch.complex64)), None, "buffer 'table' is torch.complex64"),
        (lambda: buffered(torch.eye(2).to_sparse()), None, "buffer 'table' is torch.float32, torch.sparse_coo"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(module: Any, names: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TorchHolder(module(), [], names=names)


def test_an_optimizer_whose_state_cannot_be_foreseen_or_saved_is_refused() -> None:
    model = nn.Linear(2, 2)
    for make, words in (
        (torch.optim.LBFGS, "LBFGS keeps for 'weight' cannot be foreseen"),
        (torch.optim.SparseAdam, "SparseAdam keeps for 'weight' cannot be foreseen"),
    ):
        with pytest.raises(ValueError, match=words):
            TorchHolder(model, [make(model.parameters())])  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["names"] = ["a"]
    with pytest.raises(ValueError, match="has 'names', a list, which cannot be saved"):
        TorchHolder(model, [optimizer])


class Wrapper(torch.optim.Optimizer):
    """An optimizer that steps another one, as those of Accelerate do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


class Counting(torch.optim.Optimizer):
    """An optimizer that counts its steps in a list and in its parameter groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"k": 0})
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.steps.append(1)
        for group in self.param_groups:
            group["k"] += 1


def test_an_object_that_is_no_optimizer_of_the_module_is_refused() -> None:
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    for optimizer, words in (
        ("adam", "the optimizer is a str; give a torch.optim.Optimizer"),
        (Wrapper(adam), "Wrapper wraps another optimizer, .* give attach.. the inner one, optimizer.inner"),
        (torch.optim.Adam(nn.Linear(2, 2).parameters()), "the optimizer updates no parameter of the module"),
    ):
        with pytest.raises(ValueError, match=words):
            TorchHolder(model, [optimizer])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="scheduler is a str"):
        TorchHolder(model, [adam], ["cosine"])  # type: ignore[arg-type]
    # A second optimizer may train what is outside of the module.
    TorchHolder(model, [adam, torch.optim.Adam(nn.Linear(2, 2).parameters())])


def test_foreseeing_a_state_does_not_change_the_optimizer_whose_numbers_return() -> None:
    def built() -> tuple[Counting, TorchHolder]:
        model = nn.Linear(2, 2)
        optimizer = Counting(model.parameters())
        return optimizer, TorchHolder(model, [optimizer])

    (optimizer, holder), (other, restored) = built(), built()
    assert (optimizer.steps, optimizer.param_groups[0]["k"]) == ([], 0)
    for _ in range(3):
        optimizer.step()
    saved = {name: np.asarray(copy) for name, copy in holder.moments().items()}
    restored.set_moments(saved.__getitem__)
    assert other.param_groups[0]["k"] == 3


@pytest.mark.parametrize("rate", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5])], ids=str)
def test_a_rate_of_any_type_returns_also_after_a_warm_start(rate: Any) -> None:
    def built() -> tuple[torch.optim.Optimizer, TorchHolder]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 if isinstance(rate, np.generic) else rate)
        holder = TorchHolder(model, [optimizer])
        # It replaces the groups of the optimizer.
        optimizer.load_state_dict(optimizer.state_dict())
        return optimizer, holder

    (optimizer, holder), (other, restored) = built(), built()
    optimizer.param_groups[0]["lr"] = rate / 2
    saved = {name: np.asarray(copy) for name, copy in holder.moments().items()}
    restored.set_moments(saved.__getitem__)
    assert float(other.param_groups[0]["lr"]) == 0.25


SCHEDULES: dict[str, Any] = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    # It changes betas too.
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=40),
}


class Both:
    """One object that holds the schedulers of two optimizers."""

    def __init__(self, schedulers: list[Any]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        return {str(n): each.state_dict() for n, each in enumerate(self.schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for n, each in enumerate(self.schedulers):
            each.load_state_dict(state[str(n)])


@pytest.mark.parametrize("given", ["each", "both"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rates_of_all_optimizers_return_with_their_schedulers(schedule: str, given: str) -> None:
    def built() -> tuple[list[torch.optim.Optimizer], list[Any], TorchHolder]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [torch.optim.Adam(part.parameters(), lr=lr) for part, lr in zip(model, (1.0, 0.5), strict=True)]
        schedulers = [SCHEDULES[schedule](optimizer) for optimizer in optimizers]
        holder = TorchHolder(model, optimizers, schedulers if given == "each" else [Both(schedulers)])
        return optimizers, schedulers, holder

    def rates(optimizers: list[torch.optim.Optimizer], schedulers: list[Any], steps: int) -> list[Any]:
        found = []
        for _ in range(steps):
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        return found

    (optimizers, schedulers, holder), (others, later, restored) = built(), built()
    rates(optimizers, schedulers, 12)
    saved = {name: np.asarray(copy) for name, copy in holder.moments().items()}
    restored.set_moments(saved.__getitem__)
    assert rates(others, later, 3) == rates(optimizers, schedulers, 3)


def test_a_parameter_that_was_replaced_after_attach_is_refused() -> None:
    model = Small()
    state, fragments = state_of(TorchHolder(model, []))
    for fragment in fragments:
        state.adopt(
            fragment, take({path: np.zeros(shape, np.float32) for path, shape in state.shapes.items()}, fragment)
        )
    model.layers[0].weight = nn.Parameter(torch.ones(10, 6))
    with pytest.raises(ValueError, match=r"parameter 'layers\.0\.weight' is another one than at attach"):
        for fragment in fragments:
            state.stage(fragment)


def test_a_learning_rate_in_a_tensor_returns() -> None:
    def built() -> tuple[Any, Any, TorchHolder]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer, scheduler, TorchHolder(model, [optimizer], [scheduler])

    (optimizer, scheduler, holder), (other, later, restored) = built(), built()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    saved = {name: np.asarray(copy) for name, copy in holder.moments().items()}
    restored.set_moments(saved.__getitem__)
    for _ in range(2):
        assert float(other.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])
        for each in (optimizer, other, scheduler, later):
            each.step()


def test_sharded_parameters_are_refused(tmp_path: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="sharded over processes"):
            TorchHolder(fully_shard(nn.Linear(4, 4)), [])
    finally:
        torch.distributed.destroy_process_group()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, diloco_jax; diloco_jax.join; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANGS_S, check=False).returncode == 0


def test_a_parameter_that_is_sharded_over_processes_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = nn.Linear(2, 2)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), init_device_mesh("cpu", (1,))))
        with pytest.raises(ValueError, match="'weight' is sharded over processes"):
            TorchHolder(module, ())
    finally:
        torch.distributed.destroy_process_group()
