"""Only under Triton's interpreter, which test_interpreted.py starts, are the checks collected."""

import os

_IN_PROCESSES_OF_THEIR_OWN = ["check_*.py"]
_is_one = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_*.py"] if _is_one else _IN_PROCESSES_OF_THEIR_OWN

if _is_one:
    from kernels.triton_gpu import repair

    repair.install()
