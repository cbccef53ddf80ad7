"""Which of these tests a process can run: kernels are either interpreted or compiled, chosen once at import."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

COMPILED = [
    "test_interpreted.py",
    *(f"test_{name}_aot.py" for name in ("tree_attention", "medusa_project", "verify", "decoder", "linear")),
]
collect_ignore = COMPILED if INTERPRETED else ["interpret"]
