"""The op namespace. Nothing else may name it."""

import torch

NAMESPACE = "specdec_kernels"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the qualified name of an op of this package, ``namespace::op_name``."""
    return f"{NAMESPACE}::{op_name}"
