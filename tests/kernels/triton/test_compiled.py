"""What the kernels need of a GPU, known without one: as the launcher would compile them."""

import json
from typing import Any

import pytest

from ops.gpu.budgets import SHARED, Report, broken_budgets, compile_for, count

pytestmark = pytest.mark.triton

WANTED = {
    "80": ("decode", "prefill", "decode e4m3", "write e4m3"),
    "90": (
        *("decode", "prefill", "decode e4m3", "decode float32", "prefill float32"),
        *("write", "write e4m3", "copy", "sample"),
    ),
    "100": ("decode", "prefill"),
    "gfx942": ("decode", "prefill", "decode e4m3", "sample"),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from target to what its kernels compile to, once each."""
    reports: dict[str, Report] = {}

    def report_of(target: str) -> Report:
        if target not in reports:
            cache = tmp_path_factory.mktemp("triton")
            report = compile_for(target, WANTED[target], cache, timeout_s=280)
            print(
                json.dumps({name: {**part, "instructions": None} for name, part in report.items()})
            )
            reports[target] = report
        return reports[target]

    return report_of


@pytest.mark.parametrize("target", WANTED)
def test_everything_fits_is_fetched_ahead_and_multiplied_by_tensor_cores(
    target: str, compiled: Any
) -> None:
    report = compiled(target)
    assert {name.split(":")[0] for name in report} == set(WANTED[target])
    assert broken_budgets(target, report) == []


def kernel(**changed: Any) -> dict[str, Any]:
    """What is known of a kernel within all its budgets on sm_90."""
    instructions = {"HMMA.16816.F32.BF16": 8, "LDGSTS.E.BYPASS.128": 4}
    return {"shared": 1000, "registers": 90, "spilled": 0, "instructions": instructions} | changed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"shared": SHARED["90"] + 1}, "shared memory"),
        ({"spilled": 40}, "spilled"),
        ({"instructions": {"FFMA": 99, "LDGSTS.E.BYPASS.128": 4}}, "tensor cores do not multiply"),
        ({"instructions": {"HMMA.16816.F32.BF16": 8, "LDGSTS.E.64": 4}}, "16 bytes"),
        ({"instructions": {"HMMA.16816.F32.BF16": 8}}, "16 bytes"),
    ],
)
def test_a_broken_budget_is_told(changed: dict[str, Any], said: str) -> None:
    assert broken_budgets("90", {"decode: attention_kernel": kernel()}) == []
    (fault,) = broken_budgets("90", {"decode: attention_kernel": kernel(**changed)})
    assert said in fault


def test_blocks_are_copied_and_written_16_bytes_at_a_time(compiled: Any) -> None:
    report = compiled("90")
    for name in ("copy: copy_kernel", "write: write_kernel", "write e4m3: write_kernel"):
        kernel = report[name]
        wide = count(kernel, "STG.E.128")
        assert wide, name
        assert count(kernel, "STG") == wide, name


def test_hardware_converts_e4m3_where_it_can(compiled: Any) -> None:
    assert count(compiled("90")["decode e4m3: attention_kernel"], "F2FP.F16.E4M3")
    assert not count(compiled("80")["decode e4m3: attention_kernel"], "F2FP.F16.E4M3")
