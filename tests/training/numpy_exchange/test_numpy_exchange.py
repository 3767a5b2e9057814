"""An island on NumPy arrays: the same bits as an island of JAX arrays on the same machine, and nothing compiled."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment, plan_fragments, put, take
from diloco_jax.core.kinds import canonical_of
from diloco_jax.runtime.own_loop.cpu_arrays import CpuArrays
from diloco_jax.training.exchange.exchange import AdoptMode, Exchange
from diloco_jax.training.numpy_exchange.holder import NumpyArrays
from diloco_jax.training.numpy_exchange.rounding import blended
from diloco_jax.training.numpy_exchange.state import NumpyState
from diloco_jax.training.whole_state.staging import read_shards
from tests.training.islands import assert_same

FORMATS: tuple[Format, ...] = ("float32", "bfloat16", "int8", "int4", "int2", "ternary")
MODES: tuple[tuple[AdoptMode, float], ...] = (("overwrite", 0.0), ("blend", 0.3), ("rebase", 0.0))
SHAPES = {"big": (96, 40), "deep": (3, 5, 70), "flat": (300,), "one": ()}
# The layers of `deep` are stored in the middle, and travel in front.
FORMS = {path: canonical_of(shape, {"deep": (None, "layers", None)}.get(path, ())) for path, shape in SHAPES.items()}
PLAN = plan_fragments({path: form.shape for path, form in FORMS.items()}, 3, split_axis={"big": 0, "deep": 0})


def drawn(seed: int, dtype: Any = np.float32, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: np.array(scale * rng.standard_normal(shape)).astype(dtype) for path, shape in SHAPES.items()}


def canonical(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path: FORMS[path].view(value) for path, value in values.items()}


class OnJax:
    """The same parameters as JAX arrays on one device."""

    def __init__(self, params: dict[str, np.ndarray], format: Format, rebase: bool) -> None:
        layout = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("device",)), PartitionSpec())
        self.params = {path: jax.device_put(jnp.array(value), layout) for path, value in params.items()}
        described = {p: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=layout) for p, v in self.params.items()}
        self.exchange = Exchange(described, format, rebase, {path: form.order for path, form in FORMS.items()})

    def adopt(
        self, fragment: Fragment, values: dict[str, np.ndarray], mode: AdoptMode, alpha: float, sent: Any
    ) -> None:
        self.params |= self.exchange.adopt(self.params, fragment, values, mode, alpha, sent)

    def overwrite(self, values: dict[str, np.ndarray]) -> None:
        for fragment in PLAN.fragments:
            self.params |= self.exchange.overwrite(self.params, fragment, take(values, fragment))


def on_cpu(params: dict[str, np.ndarray], format: Format, rebase: bool, **moments: np.ndarray) -> NumpyState:
    return NumpyState(NumpyArrays(params, moments), FORMS, format, rebase)


def assert_same_payload(copies: tuple[Any, Any], fragment: Fragment, format: Format, exact: bool) -> None:
    """Bit for bit; or but for updates halfway between two codes, which XLA may round the other way."""
    ours, theirs = (copy.encode() for copy in copies)
    assert len(ours) == codec.encoded_size(fragment.shapes, format)
    if exact:
        assert ours == theirs, fragment.fragment_id
        return
    differing = np.count_nonzero(np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8))
    assert differing <= 0.05 * len(ours), f"{differing} of {len(ours)} bytes"
    found = [codec.decode(payload, fragment.keys_shapes, format) for payload in (ours, theirs)]
    for key in found[0]:
        scale = np.abs(found[1][key]).max() / (127 if format == "int8" else 7)
        np.testing.assert_allclose(found[0][key], found[1][key], atol=1.01 * scale)


# Each format with float32, and each 16-bit type with a format that rounds, one that does not, and one of blocks.
@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        *((format, np.float32) for format in FORMATS),
        *((format, ml_dtypes.bfloat16) for format in ("float32", "int4", "ternary")),
        *((format, np.float16) for format in ("bfloat16", "int8")),
    ],
)
def test_an_island_of_numpy_stages_and_adopts_the_bits_of_one_of_jax(format: Format, dtype: Any) -> None:
    assert any(piece.axis >= 0 for fragment in PLAN.fragments for piece in fragment.slices)
    first = drawn(0, dtype)
    exact = dtype is np.float32 or format not in ("int8", "int4")
    rebase = exact and format in ("int4", "float32")
    arrays = {path: value.copy() for path, value in first.items()}
    numpy, jaxes = on_cpu(arrays, format, rebase), OnJax(first, format, rebase)
    modes = [mode for mode in MODES if rebase or mode[0] != "rebase"]
    sent: dict[int, Any] = dict.fromkeys(range(len(PLAN.fragments)), (None, None))
    for turn in range(2 * len(modes)):
        mode, alpha = modes[turn % len(modes)] if turn else MODES[0]
        anchor = canonical(drawn(10 + turn))
        for fragment in PLAN.fragments:
            ours, theirs = sent[fragment.fragment_id]
            values = take(anchor, fragment)
            how: AdoptMode = "overwrite" if mode == "rebase" and ours is None else mode
            numpy.adopt(fragment, values, mode=how, alpha=alpha, sent=ours)
            jaxes.adopt(fragment, values, how, alpha, theirs)
        assert_same(arrays, {path: np.asarray(value) for path, value in jaxes.params.items()})
        assert_same(
            numpy.anchors(PLAN.fragments),
            {path: np.asarray(value) for path, value in jaxes.exchange.anchors(PLAN.fragments).items()},
        )
        # A few steps of training, of another size than the anchors.
        moved = canonical({p: v.astype(np.float32) + drawn(20 + turn, scale=1e-2)[p] for p, v in arrays.items()})
        for fragment in PLAN.fragments:
            numpy.overwrite(fragment, take(moved, fragment))
        jaxes.overwrite(moved)
        for fragment in PLAN.fragments:
            copies = numpy.stage(fragment), jaxes.exchange.stage(jaxes.params, fragment)
            assert_same_payload(copies, fragment, format, exact)
            # One fragment of each turn is not merged, so it keeps its earlier residual.
            merged = exact and fragment.fragment_id != turn
            sent[fragment.fragment_id] = copies if merged else (None, None)


def test_a_copy_is_of_its_step_whatever_the_next_one_changes() -> None:
    arrays = drawn(0)
    state, zeros = on_cpu(arrays, "float32", rebase=False), canonical({path: 0 * v for path, v in arrays.items()})
    for fragment in PLAN.fragments:
        state.adopt(fragment, take(zeros, fragment))
        state.overwrite(fragment, take(canonical(drawn(1)), fragment))
    staged = [state.stage(fragment) for fragment in PLAN.fragments]
    for value in arrays.values():
        value += 1
    with ThreadPoolExecutor(1) as thread:
        for fragment, payload in zip(PLAN.fragments, thread.map(lambda copy: copy.encode(), staged), strict=True):
            found = codec.decode(payload, fragment.keys_shapes, "float32")
            assert_same(found, {key: 0 - value for key, value in take(canonical(drawn(1)), fragment).items()})


def test_what_is_not_finite_is_not_sent_and_an_adoption_heals_it() -> None:
    arrays = drawn(0)
    state = on_cpu(arrays, "int4", rebase=False)
    fragment = PLAN.fragments[0]
    key = fragment.slices[0].key
    state.adopt(fragment, take(canonical(drawn(1)), fragment))
    arrays[fragment.slices[0].path][...] = np.nan
    staged = state.stage(fragment)
    with pytest.raises(codec.NotFinite, match=f"'{fragment.slices[0].path}.* holds NaN"):
        staged.encode()
    assert staged.residual() is None
    state.adopt(fragment, take(canonical(drawn(2)), fragment), mode="blend", alpha=0.0, sent=staged)
    assert np.isfinite(take(canonical(arrays), fragment)[key]).all()
    with pytest.raises(ValueError, match=r"has shape None, expected"):
        state.adopt(fragment, {})
    with pytest.raises(ValueError, match="rebase=True"):
        state.adopt(fragment, take(canonical(drawn(2)), fragment), mode="rebase", sent=staged)


def test_blends_round_towards_the_global_value_in_16_bits() -> None:
    one = np.ones(4, ml_dtypes.bfloat16)
    # The next number above 1 is 1 + 2^-7. Half of the difference is rounded to even, which is 1, and not to the value.
    value = np.full(4, 1 + 2**-7, np.float32)
    assert (blended(one, value, 0.5).astype(np.float32) == value).all()
    assert blended(np.ones(1), np.zeros(1, np.float32), 0.25) == 0.25


def test_a_whole_state_comes_back_and_another_one_is_refused(compilations: list[str]) -> None:
    arrays, moments = drawn(0, ml_dtypes.bfloat16), {"big/mean": np.full((96, 40), 2.0), "step": np.array(7)}
    state = on_cpu(arrays, "int4", False, **moments)
    shards = state.stage_shards()
    saved = b"".join(codec.as_bytes(np.asarray(copy)) for copy in shards.copies)
    leaves, want = read_shards(shards.shards, saved), {path: value.copy() for path, value in arrays.items()}
    for value in (*arrays.values(), *moments.values()):
        value[...] = 0
    state.check_shards(leaves)
    state.load_shards(leaves)
    assert_same(arrays, want)
    assert moments["step"] == 7 and (moments["big/mean"] == 2.0).all()
    staged = state.stage_moments()
    assert sorted(staged.layout.by_name) == sorted(
        ["optimizer/big/mean", "optimizer/step", *(f"params/{p}" for p in arrays)]
    )
    moments["step"][...] = 9
    assert staged.leaf("optimizer/step") == 7
    other = on_cpu(drawn(0, ml_dtypes.bfloat16), "int4", False, step=np.array(7.0))
    with pytest.raises(ValueError, match="differs in 'optimizer/big/mean'"):
        other.check_shards(leaves)
    assert compilations == []


def test_the_global_model_is_put_together_from_the_anchors() -> None:
    arrays = drawn(0, np.float64)
    state = on_cpu(arrays, "int4", rebase=False)
    for fragment in PLAN.fragments:
        state.adopt(fragment, take(canonical(drawn(3)), fragment))
        state.overwrite(fragment, take(canonical(drawn(4)), fragment))
    want = canonical({path: np.zeros(shape, np.float32) for path, shape in SHAPES.items()})
    for fragment in PLAN.fragments:
        want = put(want, fragment, take(canonical(drawn(3)), fragment))
    assert_same(
        state.anchors(PLAN.fragments),
        {path: FORMS[path].stored(value).astype(np.float64) for path, value in want.items()},
    )


@pytest.mark.parametrize("lie", [lambda value: value.sum(), lambda value: value[None], None])
def test_a_holder_that_reads_other_pieces_than_it_was_asked_for_is_refused(lie: Any) -> None:
    class Holder(NumpyArrays):
        def read(self, pieces: Any) -> dict[str, np.ndarray]:
            return {key: lie(value) for key, value in super().read(pieces).items()} if lie else {}

    arrays = drawn(0)
    state = NumpyState(Holder(arrays), FORMS, "float32", rebase=False)
    for fragment in PLAN.fragments:
        state.adopt(fragment, take(canonical(arrays), fragment))
    with pytest.raises(ValueError, match=r"the holder's read\(\) returned .* with shape .*, and the piece has"):
        for fragment in PLAN.fragments:
            state.stage(fragment)


def test_a_holder_has_a_type_for_each_path() -> None:
    arrays = NumpyArrays({"w": np.ones(2, np.float32)})
    arrays.dtypes = {}
    with pytest.raises(ValueError, match="parameter 'w' has no type, or its path is not a text"):
        CpuArrays(arrays)
