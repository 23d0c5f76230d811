"""How many cases a fuzz test makes: 1,000, or as many as FUZZ_CASES says (`make fuzz`: 10,000)."""

import os

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("FUZZ_CASES", "1000"))

many_cases = settings(
    max_examples=CASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
