"""What the sections told, as a table and as JSON."""

import json
import platform
from typing import Any, Final

KINDS: Final = ("row", "target", "left_out", "fault")

Told = dict[str, Any]
"""By kind, a list of what was told; and `took_s`."""


def by_kind(lines: str) -> Told:
    """What a section printed; a line cut short by its end is dropped."""
    told: Told = {kind: [] for kind in KINDS}
    for line in lines.splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        told[entry.pop("kind")].append(entry)
    return told


def not_begun(name: str) -> Told:
    """Of a section for which there was no time."""
    return by_kind(json.dumps({"kind": "left_out", "what": name, "why": "no time left"})) | {
        "took_s": 0.0
    }


def values_of(told: Told) -> dict[str, float]:
    """The values of a section's rows, by what was measured."""
    return {row["what"]: row["value"] for row in told.get("row", [])}


def show(name: str, told: Told) -> None:
    """Print a section."""
    print(f"\n{name} ({told['took_s']:.0f} s)")
    width = max((len(row["what"]) for row in told["row"]), default=0)
    for row in told["row"]:
        note = f"   {row['note']}" if row["note"] else ""
        print(f"  {row['what']:<{width}}  {number(row['value']):>10} {row['unit']}{note}".rstrip())
    for what, count, why in _gathered(told["left_out"]):
        print(f"  left out ({why}): {what}" + (f" and {count - 1} more" if count > 1 else ""))
    for target in told["target"]:
        print(f"  {target_line(target)}")
    for fault in told["fault"]:
        print(f"  WRONG {fault['what']}: {fault['why']}")


def _gathered(left_out: list[dict[str, str]]) -> list[tuple[str, int, str]]:
    """(the first, how many, why) of all that were left out for one reason."""
    reasons: dict[str, list[str]] = {}
    for entry in left_out:
        reasons.setdefault(entry["why"], []).append(entry["what"])
    return [(names[0], len(names), why) for why, names in reasons.items()]


def target_line(target: dict[str, Any]) -> str:
    """A target in words."""
    met = "met" if target["is_met"] else "MISSED"
    return (
        f"target {met}: {target['what']}: {number(target['value'])} {target['unit']}, "
        f"aim {number(target['limit'])}"
    )


def number(value: float) -> str:
    """Four digits that count, and no exponent where there can be none.

    >>> number(0.98766), number(1234.5), number(12.345), number(0.0000012)
    ('0.9877', '1,234', '12.35', '1.2e-06')
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def whole(sections: dict[str, Told], *, is_dry: bool, took_s: float) -> dict[str, Any]:
    """All of it, for JSON; `is_right` if there is no fault."""
    return {
        "is_dry": is_dry,
        "is_right": not any(told["fault"] for told in sections.values()),
        "took_s": took_s,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "sections": sections,
    }


def conclude(check: dict[str, Any], file: str) -> None:
    """Print the end."""
    sections = check["sections"]
    num_faults = sum(len(told["fault"]) for told in sections.values())
    targets = [target for told in sections.values() for target in told["target"]]
    print()
    if check["is_dry"]:
        print("dry: tiny shapes in Triton's interpreter; no time above means anything")
    else:
        for target in targets:
            print(target_line(target))
    verdict = "all right" if check["is_right"] else f"{num_faults} WRONG"
    print(f"{verdict}, {check['took_s']:.0f} s; all numbers: {file}")
