"""Which of these tests a process can run: kernels are either interpreted or compiled, chosen once at import."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = (
    ["test_interpreted.py", "test_tree_attention_aot.py", "test_medusa_project_aot.py"]
    if INTERPRETED
    else ["interpret"]
)
