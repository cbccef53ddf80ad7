"""Verification: which drafted tokens the target accepts, and what comes after them.

Shared by all rules. Node 0 is the root, the pending token: always accepted, and its id is not read.
``target_logits[:, i]`` is the target's prediction after node *i*. Uniform *i* decides node *i*; uniform 0 makes the
final draw. Rows are independent: what a row returns does not depend on its slot or on other rows.
"""

from torch import Tensor

from .._ops import ops
from .._registry import define_op
from ..reference import verify as reference
from ..types import Verification
from ._verify_checks import (
    check_draft,
    check_lengths,
    check_parents,
    check_randomness,
    check_target,
    check_thresholds,
)
from ._verify_fakes import fake_chain, fake_tree
from ._verify_philox import philox_uniforms

__all__ = ["philox_uniforms", "verify_chain", "verify_tree", "verify_tree_greedy", "verify_tree_typical"]

define_op(
    "verify_chain(Tensor draft_ids, Tensor target_logits, Tensor? draft_logits, Tensor temperature, Tensor uniforms, "
    "Tensor? draft_len, *, bool block, Tensor? draft_vocab_map) -> (Tensor, Tensor, Tensor)",
    reference=reference.verify_chain_ref,
    triton="kernels.verify:verify_chain_triton",
    fake=fake_chain,
    native=("cpu",),
)
define_op(
    "verify_tree(Tensor ids, Tensor parents, Tensor target_logits, Tensor? draft_logits, Tensor temperature, "
    "Tensor uniforms, Tensor? num_nodes, *, bool with_replacement, Tensor? draft_vocab_map) "
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.verify_tree_ref,
    triton="kernels.verify:verify_tree_triton",
    fake=fake_tree,
    native=("cpu",),
)
define_op(
    "verify_tree_greedy(Tensor ids, Tensor parents, Tensor target_logits, Tensor? num_nodes) "
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.verify_tree_greedy_ref,
    triton="kernels.verify:verify_tree_greedy_triton",
    fake=fake_tree,
    native=("cpu",),
)
define_op(
    "verify_tree_typical(Tensor ids, Tensor parents, Tensor target_logits, Tensor temperature, Tensor uniforms, "
    "Tensor? num_nodes, *, float epsilon, float delta) -> (Tensor, Tensor, Tensor)",
    reference=reference.verify_tree_typical_ref,
    triton="kernels.verify:verify_tree_typical_triton",
    fake=fake_tree,
    native=("cpu",),
)


def verify_chain(
    draft_ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    uniforms: Tensor,
    draft_len: Tensor | None = None,
    *,
    block: bool = False,
    draft_vocab_map: Tensor | None = None,
) -> Verification:
    """Accept a prefix of each row's chain of drafts so that the emitted tokens follow the target exactly.

    Draft i, token x drawn from q, is accepted iff all drafts before it are and ``u[i] * q(x) < p(x)``. After the first
    rejection the final token is drawn from ``norm(max(p - q, 0))``, after none from the target's p::

        node           0        1        2        3
        draft_ids               x1       x2       x3        draft_len = 3
        target_logits  p(.|0)   p(.|1)   p(.|2)   p(.|3)    row i judges node i + 1 or makes the final draw
        draft_logits   q(.|0)   q(.|1)   q(.|2)             row i: what x[i+1] was drawn from
        uniforms       final    x1       x2       x3

    The same chain given to `verify_tree` returns the same bits.

    Args:
        draft_ids: ``(B, N) int64``, ids of the target's vocabulary, N >= 0.
        target_logits: ``(B, N+1, V)``, V >= 1; otherwise as in `verify_tree`.
        draft_logits: ``(B, N, V)``, or None for chosen drafts; otherwise as in `verify_tree`.
        temperature: ``(B,) fp32``, as in `verify_tree`.
        uniforms: ``(B, N+1)`` fp32 or fp64 in [0, 1).
        draft_len: ``(B,) int32`` in [0, N], drafts in use of each row; None: all. Nothing behind them is looked at.
        block: verify prefixes as a whole: prefix i passes iff ``u[i] < h[i]``, and the longest that passes is kept. As
            exact, accepts at least as many on average. Reads every row in use, where the default stops at the first
            rejection.
        draft_vocab_map: ``(V',) int64``, as in `verify_tree`.

    Returns:
        A `Verification` with N as here; `accepted` is 1, 2, ….

    Not checked, Raises: as in `verify_tree`.

    Example:
        >>> import torch
        >>> from specdec_kernels import verify_chain
        >>> p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]]).log()
        >>> q = torch.tensor([[[0.2, 0.6, 0.2]]]).log()
        >>> one = torch.ones(1)
        >>> verify_chain(torch.tensor([[1]]), p, q, one, torch.tensor([[0.5, 0.49]])).output_ids    # 0.49 * 0.6 < 0.3
        tensor([[1, 2]])
        >>> verify_chain(torch.tensor([[1]]), p, q, one, torch.tensor([[0.5, 0.51]])).output_ids    # p - q: only id 0
        tensor([[ 0, -1]])

    Sources: Leviathan et al. 2023, algorithm 1; Chen et al. 2023. ``block``: Sun et al. 2024, algorithm 2.
    """
    op = "verify_chain"
    num_rows, num_nodes = check_target(op, "draft_ids", draft_ids, target_logits, has_root=False)
    check_draft(op, draft_logits, draft_vocab_map, num_rows, num_nodes - 1, target_logits)
    check_randomness(op, temperature, uniforms, (num_rows, num_nodes), target_logits)
    check_lengths(op, "draft_len", draft_len, num_rows, num_nodes - 1, target_logits)
    return Verification(
        *ops.verify_chain.default(
            draft_ids,
            target_logits,
            draft_logits,
            temperature,
            uniforms,
            draft_len,
            block=block,
            draft_vocab_map=draft_vocab_map,
        )
    )


def verify_tree(
    ids: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    uniforms: Tensor,
    num_nodes: Tensor | None = None,
    *,
    with_replacement: bool = False,
    draft_vocab_map: Tensor | None = None,
) -> Verification:
    """Accept a path of each row's draft tree so that the emitted tokens follow the target exactly.

    From the root on, the children of the current node are judged in index order. Child i with token ``x`` is accepted
    iff ``u[i] * q(x) < p(x)`` and then becomes the current node; if not, p becomes ``norm(max(p - q, 0))``, x leaves q,
    which is renormalised, and the next child is judged. The final token is drawn from p as it is in the end::

        parents  -1 0 0 1 1      0 ── 1 ── 3      1, then 2 are judged by target_logits[:, 0], drawn from
                                 │    └─ 4        draft_logits[:, 0]; 3, then 4 by row 1, if 1 is accepted
                                 └─ 2

    Args:
        ids: ``(B, T) int64``, ids of the target's vocabulary, T >= 1. ``ids[:, 0]`` is the pending token and not read.
            A node whose id is not in [0, V) does not exist: it is never accepted.
        parents: ``(B or 1, T) int32``, ``parents[:, 0] == -1`` and ``0 <= parents[:, i] < i``.
        target_logits: ``(B, T, V)`` fp16, bf16, fp32 or fp64, V >= 1; the last dimension contiguous, other strides
            free. ``-inf`` is a filtered token. A row that is needed but has no finite maximum (NaN, +inf, only -inf)
            makes its batch row unreadable. Rows that are not needed are not looked at.
        draft_logits: ``(B, T, V)``, same dtypes; row i: what node i's children were drawn from, in the precision that
            it was drawn with, filtered in the same way. **None says that the drafts were chosen, not drawn** (top-k
            candidates, n-grams). None for drawn drafts is exact but accepts fewer; logits for chosen drafts are not
            exact. A draft with ``q(x) == 0`` cannot have been drawn and is judged as chosen; less than 2^-1020 of the
            largest probability counts as 0, in the target's rows too.
        temperature: ``(B,) fp32``, finite, >= 0; divides target and draft logits. Below 1e-5 the row is greedy: the
            draft that is the target's argmax (the lowest, if several) is accepted; draft_logits and uniforms do not
            matter. For drafts drawn at another temperature t scale the draft logits by ``temperature / t``.
        uniforms: ``(B, T)`` fp32 or fp64 in [0, 1), independent; see `philox_uniforms`. Column i decides node i, column
            0 makes the final draw.
        num_nodes: ``(B,) int32`` in [0, T], nodes in use of each row; None: all; 0 counts as 1. Nothing behind them is
            looked at.
        with_replacement: siblings were drawn independently of each other: q stays as it is, and more are accepted.
            Default: without replacement, exact for both.
        draft_vocab_map: ``(V',) int64`` offsets for a draft vocabulary of its own, as EAGLE-3's ``d2t``: draft_logits
            are ``(B, T, V')`` and their column j is the target's id ``j + draft_vocab_map[j]``, in [0, V).

    Returns:
        A `Verification` with ``N = T - 1``. A row that is unreadable has count 0 and only -1.

    Not checked: values on a GPU and under compilation. There parents or lengths out of range accept no node that they
    concern, and map entries out of range are dropped. That drafts do come from draft_logits is never checked.

    Raises:
        TypeError: an argument is no tensor or of the wrong dtype.
        ValueError: a shape, device or stride; a value out of the ranges above (on the CPU); a map without draft_logits.
        RuntimeError: logits require grad while grad is on.

    Example:
        >>> import torch
        >>> from specdec_kernels import verify_tree
        >>> p = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 3, 3)
        >>> ids, parents = torch.tensor([[7, 0, 1]]), torch.tensor([[-1, 0, 0]], dtype=torch.int32)
        >>> u = torch.tensor([[0.5, 0.6, 0.55]])     # 0.6 rejects id 0; then p(1) = 0.3 / (0.3 + 0.2) = 0.6 > 0.55
        >>> verify_tree(ids, parents, p, None, torch.ones(1), u)
        Verification(output_ids=tensor([[ 1,  0, -1]]), num_accepted=tensor([1], dtype=torch.int32), \
accepted=tensor([[ 2, -1]], dtype=torch.int32))

    Sources: recursive rejection sampling: Miao et al. 2024 (SpecInfer); without replacement: Jeon et al. 2024 (RSD),
    Chen et al. 2024 (Sequoia).
    """
    op = "verify_tree"
    shape = check_target(op, "ids", ids, target_logits, has_root=True)
    check_draft(op, draft_logits, draft_vocab_map, *shape, target_logits)
    check_randomness(op, temperature, uniforms, shape, target_logits)
    check_lengths(op, "num_nodes", num_nodes, *shape, target_logits)
    check_parents(op, parents, num_nodes, shape, target_logits)
    return Verification(
        *ops.verify_tree.default(
            ids,
            parents,
            target_logits,
            draft_logits,
            temperature,
            uniforms,
            num_nodes,
            with_replacement=with_replacement,
            draft_vocab_map=draft_vocab_map,
        )
    )


def verify_tree_greedy(
    ids: Tensor, parents: Tensor, target_logits: Tensor, num_nodes: Tensor | None = None
) -> Verification:
    """Follow the target's argmax through each row's draft tree.

    The child of the current node whose token is the target's argmax after that node is accepted; the final token is the
    argmax after the last accepted node. Ties go to the lowest id, of equal siblings to the first. What `verify_tree`
    does at temperature 0.

    Args, Returns, Not checked, Raises: as in `verify_tree`.

    Example:
        >>> import torch
        >>> from specdec_kernels import verify_tree_greedy
        >>> logits = torch.eye(4)[[2, 0, 3]][None]
        >>> ids, parents = torch.tensor([[9, 1, 2]]), torch.tensor([[-1, 0, 0]], dtype=torch.int32)
        >>> verify_tree_greedy(ids, parents, logits).output_ids
        tensor([[ 2,  3, -1]])
    """
    op = "verify_tree_greedy"
    shape = check_target(op, "ids", ids, target_logits, has_root=True)
    check_lengths(op, "num_nodes", num_nodes, *shape, target_logits)
    check_parents(op, parents, num_nodes, shape, target_logits)
    return Verification(*ops.verify_tree_greedy.default(ids, parents, target_logits, num_nodes))


def verify_tree_typical(
    ids: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    num_nodes: Tensor | None = None,
    *,
    epsilon: float,
    delta: float,
) -> Verification:
    """Accept drafts that are not improbable for the target, and take the longest such path. Not exact.

    Child i with token x of an accepted node is accepted iff ``p(x) > min(epsilon, delta * exp(-H(p)))``, with p the
    target's distribution after its parent, under the temperature, and H its entropy in nats. The deepest accepted node
    ends the path, of several the one with the lowest index; the final token is drawn from p after it.

    Args:
        epsilon: >= 0; a token above it is accepted whatever the entropy. Medusa: 0.09.
        delta: >= 0; scale of the threshold that falls with the entropy. Medusa: 0.3.
        others: as in `verify_tree`. Of the uniforms only column 0 is used. Greedy rows have p one-hot and H = 0, so
            they follow the argmax unless epsilon and delta are both at least 1.

    Returns, Not checked, Raises: as in `verify_tree`; ValueError for epsilon or delta below 0, TypeError for none.

    Example:
        >>> import torch
        >>> from specdec_kernels import verify_tree_typical
        >>> p = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(1, 3, 4)     # threshold 0.3 * exp(-1.213) = 0.0892
        >>> ids, parents = torch.tensor([[9, 0, 3]]), torch.tensor([[-1, 0, 1]], dtype=torch.int32)
        >>> u = torch.full((1, 3), 0.6)
        >>> verify_tree_typical(ids, parents, p, torch.ones(1), u, epsilon=0.09, delta=0.3).output_ids
        tensor([[0, 3, 1]])

    Source: Cai et al. 2024 (Medusa), typical acceptance.
    """
    op = "verify_tree_typical"
    shape = check_target(op, "ids", ids, target_logits, has_root=True)
    check_randomness(op, temperature, uniforms, shape, target_logits)
    check_lengths(op, "num_nodes", num_nodes, *shape, target_logits)
    check_parents(op, parents, num_nodes, shape, target_logits)
    check_thresholds(op, epsilon=epsilon, delta=delta)
    return Verification(
        *ops.verify_tree_typical.default(
            ids, parents, target_logits, temperature, uniforms, num_nodes, epsilon=epsilon, delta=delta
        )
    )
