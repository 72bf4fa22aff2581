"""Arguments as a user writes them: what they mean, the tensors made from them, and each way to write one wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autofuse import ops
from autofuse.errors import InputError
from autofuse.functions import bind, load_function
from autofuse.inputs import (
    DTYPES,
    INTEGER_BITS,
    ArgSpec,
    Cases,
    CaseSpec,
    ScalarSpec,
    TensorSpec,
    case_specs,
    check_axes,
    make_tensor,
    parse_arg,
    parse_dtype,
    parse_dtypes,
    parse_name,
    parse_sizes,
)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("rows,4096", TensorSpec(("rows", 4096))),
        ("4096", TensorSpec((4096,))),
        ("0", TensorSpec((0,))),
        (" rows , 8 : bf16 ", TensorSpec(("rows", 8), "bfloat16")),
        ("rows:int64:0..32000", TensorSpec(("rows",), "int64", 0, 32000)),
        ("rows:int8:-128..128", TensorSpec(("rows",), "int8", -128, 128)),
        ("rows:int64:0..cols", TensorSpec(("rows",), "int64", 0, "cols")),
        ("rows:int32:1..cols/128", TensorSpec(("rows",), "int32", 1, "cols/128")),
        ("4:float32:-0.5..1e-1", TensorSpec((4,), "float32", -0.5, 0.1)),
        ("rows,2*cols,cols/128", TensorSpec(("rows", "2*cols", "cols/128"))),
        ("():float32", TensorSpec((), "float32")),
        ("()", TensorSpec(())),
        ("0.125", ScalarSpec(0.125)),
        ("1e3", ScalarSpec(1000.0)),
        ("-inf", ScalarSpec(float("-inf"))),
        ("-3", ScalarSpec(-3)),
        ("3:int", ScalarSpec(3)),
        ("3:float", ScalarSpec(3.0)),
        ("true", ScalarSpec(True)),
        ("false", ScalarSpec(False)),
    ],
)
def test_arguments(text: str, meaning: TensorSpec | ScalarSpec) -> None:
    found = parse_arg(text)
    assert found == meaning
    if isinstance(meaning, ScalarSpec):  # True == 1 == 1.0
        assert isinstance(found, ScalarSpec) and type(found.value) is type(meaning.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no argument"),
        ("rows:int64:0..5:x", "no argument"),
        ("rows,40a6", "'40a6' in 'rows,40a6' is no extent"),
        ("rows,,4", "'' in 'rows,,4' is no extent"),
        ("rows,-4", "'-4' in 'rows,-4' is no extent"),
        ("rows,cols/0", "'cols/0' in"),
        ("rows:float31", "'float31' is no dtype: it may be float32, bfloat16"),
        ("rows:int64:5", "'5' is no range: write LOW..HIGH"),
        ("rows:int64:5..5", "LOW below HIGH"),
        ("rows:int64:0..1.5", "'0..1.5' is no range"),
        ("rows:float32:0..inf", "'0..inf' is no range"),
        ("rows:float32:0..cols", "'0..cols' is no range"),
        ("rows:int64:0..cols/0", "'cols/0' in '0..cols/0' is no extent"),
        ("rows:uint8:-1..cols", "the range -1..cols leaves uint8, which holds 0 to 255"),
        ("rows:int8:0..300", "the range 0..300 leaves int8, which holds -128 to 127"),
        ("rows:bool:0..2", "a bool argument takes no range"),
        ("1.5:int", "'1.5:int' is no Python int"),
        ("3:int:0..5", "is no Python int"),
    ],
)
def test_bad_arguments(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arg(text)
    assert message in str(caught.value)


def test_small_parsers() -> None:
    assert parse_name("x = rows,4", "x=4") == ("x", "rows,4")
    assert parse_sizes("16, 2048") == (16, 2048)
    assert parse_dtypes("bf16,float16") == ("bfloat16", "float16")
    assert parse_dtype("torch.int8") == "int8"
    for bad in ("x", "=4", "x=", "1x=4", "x y=4"):
        with pytest.raises(InputError, match="as in x=4"):
            parse_name(bad, "x=4")
    for bad in ("", "4,", "-1", "1.5", "a"):
        with pytest.raises(InputError, match="is no extent"):
            parse_sizes(bad)
    with pytest.raises(InputError, match="int8 is no floating-point dtype"):
        parse_dtypes("bf16,int8")


def test_every_dtype_of_the_library_can_be_written() -> None:
    assert set(DTYPES) == set(ops.STORAGE.values())
    for name, (least, most) in INTEGER_BITS.items():
        info = torch.iinfo(ops.TORCH[name])
        assert (info.min, info.max) == (least, most)


def test_axes_must_agree() -> None:
    args: dict[str, ArgSpec] = {"x": TensorSpec(("rows", "2*cols")), "s": ScalarSpec(1.0)}
    check_axes(args, {"rows": (1,), "cols": (2,)})
    with pytest.raises(InputError, match="the axis 'cols' of argument 'x' has no values"):
        check_axes(args, {"rows": (1,)})
    with pytest.raises(InputError, match=r"'cols' of argument .* \(no argument names 'colz': is it a typo\?\)"):
        check_axes(args, {"rows": (1,), "colz": (2,)})
    with pytest.raises(InputError, match="no argument names the axis 'heads': they name cols, rows"):
        check_axes(args, {"rows": (1,), "cols": (2,), "heads": (3,)})
    with pytest.raises(InputError, match="they name none"):
        check_axes({}, {"rows": (1,)})


def test_cases_are_the_product_of_axes_and_dtypes() -> None:
    args = (TensorSpec(("rows", "cols")), TensorSpec(("cols",), "float16"))
    specs = case_specs(args, {"rows": (2, 3), "cols": (4, 5)}, ("float32", "bfloat16"))
    made = [(tuple(x.shape), str(x.dtype), tuple(y.shape), str(y.dtype)) for x, y in Cases(specs, "cpu")]
    assert made == [
        ((rows, cols), f"torch.{dtype}", (cols,), "torch.float16")
        for dtype in ("float32", "bfloat16")
        for rows in (2, 3)
        for cols in (4, 5)
    ]
    assert len(case_specs(args[1:], {"cols": (4, 4)}, ("float32", "bfloat16"))) == 1  # equal workloads appear once


def test_cases_are_a_sequence_and_the_same_for_the_same_seed() -> None:
    specs = case_specs((TensorSpec(("rows", 64)), ScalarSpec(0.5)), {"rows": (2, 3)}, ("float32",))
    cases, again, other = Cases(specs, "cpu", 1), Cases(specs, "cpu", 1), Cases(specs, "cpu", 2)
    assert len(cases) == 2 and cases[0][1] == 0.5
    assert torch.equal(cases[1][0], again[-1][0]) and torch.equal(cases[1][0], list(cases)[1][0])
    assert not torch.equal(cases[0][0], other[0][0])
    assert not torch.equal(cases[0][0], cases[1][0][:2])
    assert len(cases[1:]) == 1
    with pytest.raises(IndexError):
        cases[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: str) -> None:
    made = make_tensor(TensorSpec(("rows", 4096)), {"rows": 64}, dtype, "cpu", 0)
    assert made.dtype == ops.TORCH[dtype] and made.shape == (64, 4096)
    values = made.double()
    if dtype == "bool":
        assert values.unique().tolist() == [0, 1] and abs(values.mean() - 0.5) < 0.01
    elif dtype in INTEGER_BITS:
        assert values.unique().tolist() == list(range(100))
    else:
        assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01


@pytest.mark.parametrize("dims", [(4 * 10**11, 4096), (10**12, 10**12), ("999999999999*rows", 10**12)])
def test_a_tensor_that_memory_cannot_hold(dims: tuple[int | str, ...]) -> None:
    with pytest.raises(InputError, match="does not fit into the memory of cpu: make its extents smaller"):
        make_tensor(TensorSpec(dims), {"rows": 10**11}, "float32", "cpu", 0)


def test_ranges() -> None:
    labels = make_tensor(parse_arg_tensor("100000:int64:-3..3"), {}, "float32", "cpu", 0)
    assert labels.unique().tolist() == [-3, -2, -1, 0, 1, 2]
    floats = make_tensor(parse_arg_tensor("100000:float64:2..3"), {}, "float32", "cpu", 0)
    assert 2 <= floats.min() < 2.001 and 2.999 < floats.max() < 3
    assert make_tensor(parse_arg_tensor("():float32"), {}, "float64", "cpu", 0).shape == ()


def parse_arg_tensor(text: str) -> TensorSpec:
    found = parse_arg(text)
    assert isinstance(found, TensorSpec)
    return found


def test_parts_of_an_axis() -> None:
    spec = CaseSpec((TensorSpec(("2*cols", "cols/8", "3*cols/2")),), (("cols", 24),), "float32")
    spec.check()
    assert spec.make("cpu", 0)[0].shape == (48, 3, 36)
    with pytest.raises(InputError, match="the extent cols/8 is no whole number where cols is 20"):
        CaseSpec(spec.args, (("cols", 20),), "float32").check()


def test_a_range_to_the_end_of_an_axis() -> None:
    spec = parse_arg_tensor("100000:int64:-1..cols/2")
    assert spec.axes == ("cols",)
    assert make_tensor(spec, {"cols": 6}, "float32", "cpu", 0).unique().tolist() == [-1, 0, 1, 2]
    CaseSpec((spec,), (("cols", 6),), "float32").check()
    for text, cols, message in (
        ("rows:int64:4..cols", 4, r"the range 4\.\.cols is empty where cols is 4"),
        ("rows:int8:0..cols", 129, r"the range 0\.\.129 leaves int8, which holds -128 to 127"),
        ("rows:int64:0..cols/2", 5, "the extent cols/2 is no whole number where cols is 5"),
    ):
        case = CaseSpec((parse_arg_tensor(text),), (("rows", 3), ("cols", cols)), "float32")
        with pytest.raises(InputError, match=message):
            case.check()
        with pytest.raises(InputError, match=message):
            case.make("cpu", 0)


def f(x: torch.Tensor, y: torch.Tensor, scale: float = 0.5, causal: bool = False) -> torch.Tensor:
    return x + y * scale if causal else x


def scaled(x: torch.Tensor, n: int, scale: float = 1.0) -> torch.Tensor:
    return x * n * scale


def only_by_keyword(x: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    return x + eps


def any_number(*xs: torch.Tensor) -> torch.Tensor:
    return xs[0]


X, TRUE = TensorSpec((4,)), ScalarSpec(True)


@pytest.mark.parametrize(
    ("fn", "args", "order"),
    [
        (f, {"y": X, "x": TRUE}, (TRUE, X)),
        (f, {"x": X, "y": X, "causal": TRUE}, (X, X, ScalarSpec(0.5), TRUE)),
        (only_by_keyword, {"x": X}, (X,)),
    ],
)
def test_arguments_take_the_parameters_order(fn: Callable[..., Any], args: Any, order: Any) -> None:
    assert bind(fn, args) == order


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (f, {"x": X}, "f needs an argument 'y': give it with --arg y=..."),
        (f, {"x": X, "y": X, "z": X}, "f has no parameter 'z': it takes x, y, scale, causal"),
        (scaled, {"x": X, "n": X}, "n of scaled is a Python number: n=4 is a tensor of 4 elements, so write n=4:int or n=4.0"),
        (only_by_keyword, {"x": X, "eps": ScalarSpec(0.1)}, "eps of only_by_keyword can only be given by keyword"),
        (any_number, {}, "any_number takes *xs"),
    ],
)
def test_arguments_that_do_not_fit(fn: Callable[..., Any], args: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        bind(fn, args)
    assert message in str(caught.value)


def test_a_fused_function_has_its_own_parameters() -> None:
    class Fused:
        fn = staticmethod(f)

        def __call__(self, *args: Any) -> Any: ...

    assert bind(Fused(), {"x": X, "y": X}) == (X, X)


def test_functions_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 7\n")
    (tmp_path / "mine.py").write_text(
        "import beside_it\ndef g(x): return x * beside_it.VALUE\nclass C:\n  @staticmethod\n  def h(x): return x\n"
    )
    package = tmp_path / "a_users_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mod.py").write_text("def k(x): return -x\n")
    assert load_function("mine.py:g", tmp_path)(3) == 21
    assert load_function(f"{tmp_path}/mine.py:C.h", Path())(3) == 3
    assert load_function("a_users_package.mod:k", tmp_path)(3) == -3
    assert load_function("mine.py:g", tmp_path) is load_function("mine.py:g", tmp_path)
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.py", "'mine.py' names no function: write path.py:function or package.module:function"),
        (":g", "names no function"),
        ("mine.py:", "names no function"),
        ("mine.py:g(x)", "names no function"),
        ("other.py:g", "there is no file"),
        ("mine.py:nope", "mine.py has no function 'nope': it has g"),
        ("mine.py:VALUE", "VALUE in mine.py is a int, not a function"),
        ("broken.py:g", "broken.py cannot be imported: ZeroDivisionError: division by zero ("),
        ("script.py:g", "script.py cannot be imported: SystemExit: 3"),
        ("no_such_module_anywhere:g", "the module no_such_module_anywhere cannot be imported: ModuleNotFoundError"),
    ],
)
def test_functions_that_are_not_there(target: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 7\ndef g(x): return x\n")
    (tmp_path / "broken.py").write_text("def g(x): return x\n1 / 0\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(InputError) as caught:
        load_function(target, tmp_path)
    assert message in str(caught.value)
