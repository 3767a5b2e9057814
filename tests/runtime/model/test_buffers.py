"""Memory of arrays that comes back."""

from diloco_jax.runtime.model.model_share import FREE_MAX, Buffers


def test_buffers_are_written_again_and_bounded() -> None:
    buffers = Buffers(3000)
    arrays = [buffers.take(2000) for _ in range(FREE_MAX + 1)]
    for number, array in enumerate(arrays):
        array[:] = number
    kept = [array[7:9].reshape(2, 1) for array in arrays[:2]]  # a view of a view
    del arrays, array
    found = [buffers.take(3000)[:2000] for _ in range(FREE_MAX + 1)]
    assert {int(array[1]) for array in found} == {0, 2, 3, 4}, (
        "what a view shows is not written again, fresh memory is 0"
    )
    assert all((view == number).all() for number, view in enumerate(kept))
    del kept, found
    assert len(buffers._free) == FREE_MAX, "and no more of it waits"
    one = buffers.take(3000)
    one[:] = 8
    del one
    assert buffers.take(1000)[0] == 8 and (buffers.take(3000)[1024:] == 0).sum() > 900, "a shorter one frees the rest"
