"""Reading compiled programs: loops, matrix products, collectives and transfers, each against a count made by hand."""

from pathlib import Path

import pytest

from diloco_jax.tools.preflight.hlo import read_program

LOOP = Path(__file__).with_name("loop.hlo").read_text(encoding="utf-8")
ONCE = 2 * 8 * 16 * 16


@pytest.mark.parametrize(
    ("start", "end", "direction", "step", "times"),
    [(0, 6, "LT", 1, 6), (1, 6, "LE", 1, 6), (0, 7, "LT", 2, 4), (5, 0, "GE", -1, 6), (3, 3, "LT", 1, 0)],
)
def test_a_loop_counts_as_often_as_it_runs(start: int, end: int, direction: str, step: int, times: int) -> None:
    text = LOOP
    for word, value in (("START", start), ("END", end), ("DIRECTION", direction), ("STEP", step)):
        text = text.replace(word, str(value))
    program = read_program(text)
    assert program.matrix_flops == times * ONCE
    assert program.devices == 4 and not program.unread_loops


def test_a_loop_of_unknown_length_is_named() -> None:
    text = LOOP.replace("constant(START)", "parameter(1)").replace("END", "6").replace("STEP", "1")
    program = read_program(text.replace("DIRECTION", "LT"))
    assert program.unread_loops == ("loop",) and program.matrix_flops == ONCE


def test_the_compiler_may_note_the_length() -> None:
    text = LOOP.replace("body=%inner", 'body=%inner, backend_config={"known_trip_count":{"n":"9"}}')
    assert read_program(text).matrix_flops == 9 * ONCE


def entry(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, num_partitions=2\n\n{before}\n\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("left", "right", "out", "window", "labels", "multiply_adds"),
    [
        ("4,8,16", "16,32,1", "4,8,32", "window={size=1}, ", "0bf_io0->0bf", 4 * 8 * 16 * 32),
        # q k^T of 4 examples with 2 heads each, as TPUs spell it: a product per position of a dilated window
        ("4,2,512,64", "4,2,256,64", "4,2,512,256", "window={size=4x2 stride=3x1 lhs_dilate=4x2}, ", "01bf_01oi->01bf",
         4 * 2 * 512 * 256 * 64),
        # a sum over 4 heads as a window that is padded; each output meets every head once
        ("8,256,1,16", "4,16,16,1", "8,256,4,16", "window={size=1x4 pad=0_0x3_3 rhs_reversal=0x1}, ", "0b1f_1oi0->0b1f",
         8 * 256 * 4 * 16 * 16),
    ],
)  # fmt: skip
def test_convolutions(left: str, right: str, out: str, window: str, labels: str, multiply_adds: int) -> None:
    text = entry(
        f"%l = bf16[{left}]{{1,0}} parameter(0)",
        f"%r = bf16[{right}]{{1,0}} parameter(1)",
        f"ROOT %c = bf16[{out}]{{1,0:T(8,128)(2,1)}} convolution(%l, %r), {window}dim_labels={labels}",
    )
    assert read_program(text).matrix_flops == 2 * multiply_adds


def test_collectives_count_once_each_by_kind_and_bytes() -> None:
    scatter = """%all-reduce-scatter.1 (p: f32[16]) -> f32[8] {
  %p = f32[16]{0} parameter(0)
  %sum = f32[16]{0} all-reduce(%p), to_apply=%add
  ROOT %part = f32[8]{0} slice(%sum), slice={[0:8]}
}"""
    program = read_program(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%g = bf16[4,64]{1,0:T(8,128)(2,1)} all-gather(%a), dimensions={0}",
            "%s = (bf16[4,64]{1,0}, bf16[8,64]{1,0}) all-gather-start(%g), dimensions={0}",
            "%d = bf16[8,64]{1,0} all-gather-done(%s)",
            "%p = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1}}",
            "ROOT %f = f32[8]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1",
            before=scatter,
        )
    )
    assert program.collective_counts == {"all-gather": 2, "collective-permute": 1, "reduce-scatter": 1}
    assert program.collective_bytes["all-gather"] == 2 * 4 * 64 + 2 * 8 * 64


def test_collectives_in_two_halves_count_their_results_only() -> None:
    program = read_program(
        entry(
            "%a = bf16[8,256]{1,0} parameter(0)",
            "%p = (bf16[8,256]{1,0:T(8,128)(2,1)}, bf16[8,256]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)})"
            " collective-permute-start(%a), source_target_pairs={{0,1}}",
            "%d = bf16[8,256]{1,0} collective-permute-done(%p)",
            "%g = ((f32[4]{0}, f32[2,2]{1,0}), (f32[8]{0}, f32[4,2]{1,0})) all-gather-start(%a, %a), dimensions={0}",
            "%s = (f32[], f32[], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}",
            "ROOT %r = f32[16]{0} all-reduce-start(%a), to_apply=%add",
        )
    )
    assert program.collective_counts == {"all-gather": 1, "all-reduce": 1, "collective-permute": 2}
    assert program.collective_bytes == {"all-gather": 64, "all-reduce": 64, "collective-permute": 2 * 8 * 256 + 4}


def test_host_transfers_and_kernels_are_seen() -> None:
    program = read_program(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%t = token[] outfeed(%a)",
            '%h = f32[8]{0} custom-call(%a), custom_call_target="MoveToHost"',
            '%b = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"',
            'ROOT %k = f32[8]{0} custom-call(%h), custom_call_target="tpu_custom_call"',
        )
    )
    assert program.host_transfers == ("outfeed t", "custom-call h")
    assert program.kernels == 1


def test_notes_on_kernels_go_over_several_lines() -> None:
    program = read_program(
        entry(
            '%k = f32[8]{0} custom-call(), custom_call_target="tpu_custom_call", frontend_attributes={kernel={',
            '"xprof_metadata":"{}"\n}}, metadata={op_name="jit(f)/k"}',
            "%g = f32[16]{0} all-gather(%k), dimensions={0}",
        )
    )
    assert program.kernels == 1 and program.collective_counts == {"all-gather": 1}


def test_text_without_a_program() -> None:
    with pytest.raises(ValueError, match="has no entry computation"):
        read_program("HloModule m\n")


def test_collectives_beside_which_devices_compute_are_told_from_others() -> None:
    gather = "%{} (p: f32[8]) -> f32[32] {{\n  %p = f32[8] parameter(0)\n  ROOT %g = f32[{}] all-gather(%p)\n}}{}"
    pieces = [gather.format(name, 32, "") for name in ("begin", "async_collective_fusion.1", "wait")]
    before = "\n\n".join([gather.format("other_core", 16, ', execution_thread="sparsecore"'), *pieces])
    program = read_program(
        entry(
            "%a = f32[8]{0} parameter(0)",
            '%s = ((f32[8]{0}), f32[16]{0}) call-start(%a), async_execution_thread="sparsecore", to_apply=%other_core',
            "%d = f32[16]{0} call-done(%s)",
            "%async-collective-start.1 = f32[32]{0} fusion(%a), kind=kCustom, calls=%begin",
            "%f = f32[32]{0} fusion(%a), kind=kCustom, calls=%async_collective_fusion.1",
            "%async-collective-done.1 = f32[32]{0} fusion(%f), kind=kCustom, calls=%wait",
            "ROOT %g = f32[64]{0} all-gather(%a), dimensions={0}",
            before=before,
        )
    )
    found = sorted((each.num_bytes, each.overlapped) for each in program.collectives)
    assert found == [(64, True), (128, True), (256, False)], "each once"
