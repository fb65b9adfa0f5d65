"""Small HLO texts with known answers."""

import jax
import jax.numpy as jnp
import pytest

from fddp.hlo.collectives import find_collectives
from fddp.hlo.device_groups import device_groups
from fddp.hlo.flops import Work, traffic, work
from fddp.hlo.module import Array, parse

HEAD = "HloModule f, is_scheduled=true\n"


def lines_of(text):
    return {line.name: (line, home) for line, home in next(parse(text).schedules()).lines}


def work_of(text, name):
    return work(parse(text), *lines_of(text)[name])


def entry(*lines):
    return (
        HEAD
        + "ENTRY %main (p: f32[]) -> f32[] {\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


### Reading


def test_a_line_has_a_name_a_result_operands_and_attributes():
    text = entry(
        "%a = bf16[2,3]{1,0:T(8,128)} parameter(0)",
        "ROOT %both.1 = (bf16[2,3]{1,0}, /*index=1*/s32[]) fusion(%a, %a), kind=kLoop, "
        "calls=%body.2, "
        'metadata={op_name="jit(f)/bucket3/psum" stack_frame_id=2}',
    )
    text = text.replace(
        "ENTRY", "%body.2 (p: bf16[2,3]) -> bf16[2,3] {\n  %p = bf16[2,3] parameter(0)\n}\n\nENTRY"
    )
    line, _ = lines_of(text)["both.1"]
    assert (line.opcode, line.operands, line.calls) == ("fusion", ("a", "a"), ("body.2",))
    assert line.result == (Array("bf16", (2, 3)), Array("s32", ()))
    assert [array.nbytes for array in line.result] == [12, 4]
    assert line.op_name == "jit(f)/bucket3/psum"


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("f32", 40),
        ("bf16", 20),
        ("f8e4m3fn", 10),
        ("s4", 5),
        ("c64", 80),
        ("pred", 10),
        ("token", 0),
    ],
)
def test_an_array_takes_so_many_bytes(dtype, nbytes):
    assert Array(dtype, (10,)).nbytes == nbytes


def test_a_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("not HLO")


### Operations


def test_a_product_takes_two_operations_for_each_pair():
    text = entry(
        "%x = bf16[5,2,3] parameter(0)",
        "%y = bf16[5,3,4] parameter(1)",
        "%dot = f32[5,2,4] dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, "
        "rhs_contracting_dims={1}",
    )
    assert work_of(text, "dot") == (Work(2 * 5 * 2 * 4 * 3, "bf16"),)


def test_a_library_call_is_a_product():
    text = entry(
        "%x = f32[2,3] parameter(0)",
        "%y = f32[3,4] parameter(1)",
        '%call = (f32[2,4], s8[64]) custom-call(%x, %y), custom_call_target="__cublas$gemm", '
        "backend_config={"
        '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}',
    )
    assert work_of(text, "call") == (Work(48, "f32"),)


# One convolution: 8 images of 16 × 16 with 3 channels, 5 × 5 kernels, 7 features.
IMAGE = "f32[8,16,16,3]"
KERNEL = "f32[5,5,3,7]"
OUT = "f32[8,16,16,7]"
CONVOLUTION = 2 * (8 * 16 * 16 * 7) * (5 * 5 * 3)


@pytest.mark.parametrize(
    ("first", "second", "result", "target"),
    [
        (IMAGE, KERNEL, OUT, "__cudnn$convForward"),
        (OUT, KERNEL, IMAGE, "__cudnn$convBackwardInput"),
        (IMAGE, OUT, KERNEL, "__cudnn$convBackwardFilter"),
    ],
)
def test_a_convolution_costs_the_same_forwards_and_backwards(first, second, result, target):
    text = entry(
        f"%x = {first} parameter(0)",
        f"%y = {second} parameter(1)",
        f"%call = ({result}, u8[0]) custom-call(%x, %y), window={{size=5x5 pad=2_2x2_2}}, "
        f'dim_labels=b01f_01io->b01f, custom_call_target="{target}"',
    )
    assert work_of(text, "call") == (Work(CONVOLUTION, "f32"),)


def test_a_plain_convolution_is_one_too():
    text = entry(
        f"%x = {IMAGE} parameter(0)",
        f"%y = {KERNEL} parameter(1)",
        f"%conv = {OUT} convolution(%x, %y), window={{size=5x5 pad=2_2x2_2}}, "
        f"dim_labels=b01f_01io->b01f",
    )
    assert work_of(text, "conv") == (Work(CONVOLUTION, "f32"),)


@pytest.mark.parametrize(
    ("kernel", "out", "groups"),
    [
        ((3, 3, 4, 8), (6, 7, 7, 8), {}),
        ((3, 3, 2, 8), (6, 7, 7, 8), {"feature_group_count": 2}),
        ((3, 3, 4, 8), (3, 7, 7, 8), {"batch_group_count": 2}),
    ],
)
def test_a_convolution_in_groups_takes_the_operations_that_xla_counts(kernel, out, groups):
    image = (6, 9, 9, 4)

    def convolve(x, y):
        return jax.lax.conv_general_dilated(
            x, y, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **groups
        )

    lowered = jax.jit(convolve).lower(
        *(jax.ShapeDtypeStruct(dims, jnp.float32) for dims in (image, kernel))
    )
    counted = lowered.cost_analysis()
    assert counted is not None and lowered.out_info.shape == out
    x, y, output = (f"f32[{','.join(map(str, dims))}]" for dims in (image, kernel, out))
    text = entry(
        f"%x = {x} parameter(0)",
        f"%y = {y} parameter(1)",
        f"%conv = {output} convolution(%x, %y), window={{size=3x3}}, dim_labels=b01f_01io->b01f"
        + "".join(f", {name}={count}" for name, count in groups.items()),
    )
    assert work_of(text, "conv") == (Work(counted["flops"], "f32"),)


PRODUCT = """%product (a: f32[2,2], b: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2] parameter(0)
  %b = f32[2,2] parameter(1)
  ROOT %dot = f32[2,2] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""


def with_product(*lines):
    return entry(*lines).replace("ENTRY", PRODUCT + "ENTRY")


def test_a_fusion_takes_what_is_in_it_and_a_loop_that_in_each_round():
    text = with_product(
        "%x = f32[2,2] parameter(0)",
        "%fusion = f32[2,2] fusion(%x, %x), kind=kCustom, calls=%product",
        "%while = f32[2,2] while(%x), condition=%product, body=%product, "
        'backend_config={"known_trip_count":{"n":"12"}}',
    )
    assert work_of(text, "fusion") == (Work(16, "f32"),)
    assert work_of(text, "while") == (Work(12 * 16, "f32"),)


def test_a_fusion_that_takes_a_slice_reads_only_that():
    text = entry(
        "%big = f32[1000] parameter(0)",
        "%fusion = f32[10] fusion(%big), kind=kLoop, calls=%part",
    ).replace(
        "ENTRY",
        "%part (p: f32[1000]) -> f32[10] {\n  %p = f32[1000] parameter(0)\n"
        "  ROOT %slice = f32[10] slice(%p), slice={[5:15]}\n}\n\nENTRY",
    )
    assert traffic(parse(text), *lines_of(text)["fusion"]) == 4 * (10 + 10)
    # So does a fusion that runs next to others, with its input in its result: JAX 0.11's in
    # loops.
    asynchronous = text.replace(
        "%fusion = f32[10] fusion(", "%fusion = ((f32[1000]), f32[10], u32[]) fusion-start("
    )
    assert traffic(parse(asynchronous), *lines_of(asynchronous)["fusion"]) == 4 * (10 + 10)


def test_of_a_conditional_only_the_branch_that_moves_most_counts():
    """A branch copies 100 floats, or 40: each is read and written."""

    def branch(name, size):
        return (
            f"%{name} (p: f32[{size}]) -> f32[{size}] {{\n  %p = f32[{size}] parameter(0)\n"
            f"  ROOT %copy = f32[{size}] copy(%p)\n}}\n\n"
        )

    text = entry(
        "%which = s32[] parameter(0)",
        "%long = f32[100] parameter(1)",
        "%short = f32[40] parameter(2)",
        "%chosen = f32[] conditional(%which, %long, %short), branch_computations={%one, %other}",
    ).replace("ENTRY", branch("one", 100) + branch("other", 40) + "ENTRY")
    assert traffic(parse(text), *lines_of(text)["chosen"]) == 4 * (100 + 100)


### Flights

START = "all-reduce-start(%x), channel_id=1, to_apply=%add"


def flying(start="", between="", done="%done = f32[2,2] all-reduce-done(%start)"):
    return with_product(
        "%x = f32[2,2] parameter(0)",
        f"%start = f32[2,2] {START}{start}",
        between or "%other = f32[2,2] fusion(%x, %x), kind=kCustom, calls=%product",
        done,
        "%late = f32[2,2] fusion(%x, %x), kind=kCustom, calls=%product",
    )


def test_what_stands_between_start_and_done_runs_beside_an_all_reduce():
    (collective,) = find_collectives(parse(flying()))
    assert (collective.asynchronous, collective.heavy, collective.flops, collective.nbytes) == (
        True,
        1,
        16,
        16,
    )
    (collective,) = find_collectives(parse(flying(between="%copy = f32[2,2] copy(%x)")))
    assert (collective.asynchronous, collective.heavy) == (True, 0)


def test_an_all_reduce_that_is_marked_synchronous_hides_nothing():
    marked = ', backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}'
    (collective,) = find_collectives(parse(flying(start=marked)))
    assert (collective.asynchronous, collective.heavy, collective.flops) == (False, 0, 0)


def test_the_order_of_a_program_without_a_schedule_says_nothing():
    (collective,) = find_collectives(parse(flying().replace(", is_scheduled=true", "")))
    assert not collective.asynchronous


def test_merged_all_reduces_are_one_collective_of_several_arrays():
    text = entry(
        "%x = f32[8] parameter(0)",
        "%y = bf16[4] parameter(1)",
        "%both = (f32[8], bf16[4]) all-reduce(%x, %y), to_apply=%add",
    )
    (collective,) = find_collectives(parse(text))
    assert (len(collective.arrays), collective.nbytes, collective.asynchronous) == (
        2,
        32 + 8,
        False,
    )


def test_an_all_reduce_in_a_loop_or_a_general_async_pair_is_found():
    text = entry(
        "%x = f32[8] parameter(0)",
        "%begin = ((f32[8]), f32[8]) async-start(%x), calls=%wrapped",
        "%end = f32[8] async-done(%begin)",
        "%while = f32[8] while(%x), condition=%cond, body=%wrapped",
    ).replace(
        "ENTRY",
        "%wrapped (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n"
        "  ROOT %sum = f32[8] all-reduce(%p), to_apply=%add\n}\n\nENTRY",
    )
    assert [
        (collective.asynchronous, collective.loops) for collective in find_collectives(parse(text))
    ] == [
        (True, 0),
        (False, 1),
    ]


### Groups of participants


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0,1},{1,2},{2,0}}", [[0, 1], [1, 2], [2, 0]]),  # a permutation's pairs
        ("{}", []),
        ("", []),
        ("[2,3]<=[6]", [[0, 1, 2], [3, 4, 5]]),
        ("[3,2]<=[2,3]T(1,0)", [[0, 3], [1, 4], [2, 5]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['replica'=2,'stage'=3] {'replica'}", [[0, 3], [1, 4], [2, 5]]),
        ("mesh['replica'=2,'stage'=3] {'stage'}", [[0, 1, 2], [3, 4, 5]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
    ],
)
def test_devices_that_take_part_with_each_other_are_read_however_xla_writes_them(text, groups):
    assert device_groups(text) == tuple(map(tuple, groups))


@pytest.mark.parametrize("text", ["mesh['a'=4] {'a':(1)2}", "[2,2]<=x", "{{0,1}"])
def test_what_cannot_be_read_is_not_guessed(text):
    with pytest.raises(ValueError, match="cannot read"):
        device_groups(text)
