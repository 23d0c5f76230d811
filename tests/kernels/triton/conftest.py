"""Only under Triton's interpreter, which test_interpreted.py starts, are the checks collected."""

import os

collect_ignore_glob = (
    ["test_*.py"]
    if os.environ.get("TRITON_INTERPRET") == "1"
    else _NEED_TRITON
)
