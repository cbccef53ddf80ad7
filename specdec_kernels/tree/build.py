"""Draft trees as values, and their conversions to and from every format in use."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ._checks import (
    as_ints,
    check_parents,
    check_ranks,
    check_rows_end_in_leaves,
    parents_from_rows,
    parents_from_rows_of_mask,
    sibling_order,
)
from .mask import pack_mask

_TREE_KEYS = ("choices", "parents", "ranks", "retrieve_indices")


@dataclass(frozen=True)
class DraftTree:
    """A draft tree: which node continues which, and with which of the drafter's candidates.

    Node 0 is the root, the pending token. The nodes are topological: a parent comes before its children.

            0            parents (-1, 0, 0, 1, 1, 2)
          ┌─┴─┐          ranks   ( 0, 0, 1, 0, 1, 0)    which candidate of its depth a node holds
          1   2          depths  ( 0, 1, 1, 2, 2, 2)
         ┌┴┐  │          choices [0] [1] [0,0] [0,1] [1,0]
         3 4  5          leaf paths 0-1-3, 0-1-4, 0-2-5

    Trees are equal when parents and ranks are; they hash, and can key a cache.

    Args:
        parents: ``parents[0] == -1`` and ``0 <= parents[i] < i``.
        ranks: child ranks, ``ranks[0] == 0``, different between siblings.

    Raises:
        ValueError: no root, a second root, a cycle, a parent after its child or out of range, a negative rank, or two
            siblings of one rank; the message names the node.

    Example:
        >>> DraftTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]]).parents
        (-1, 0, 0, 1, 1, 2)
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "parents", as_ints("parents", self.parents))
        object.__setattr__(self, "ranks", as_ints("ranks", self.ranks))
        check_parents(self.parents)
        check_ranks(self.parents, self.ranks)

    @property
    def num_nodes(self) -> int:
        """``T``, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """``N``, the longest path, root excluded."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, by node id."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @property
    def leaves(self) -> tuple[int, ...]:
        """The nodes without children, by node id."""
        return tuple(node for node, children in enumerate(self.children) if not children)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to ``node``, both included; ValueError when there is no such node."""
        if not 0 <= node < self.num_nodes:
            raise ValueError(f"DraftTree: node must be in [0, {self.num_nodes - 1}], got {node}")
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def prefix(self, num_nodes: int) -> "DraftTree":
        """Return the tree of the first nodes, itself when it has no more.

        Raises:
            ValueError: ``num_nodes`` is below 1.

        Example:
            >>> DraftTree.chain(4).prefix(3) == DraftTree.chain(2)
            True
        """
        if num_nodes < 1:
            raise ValueError(f"DraftTree.prefix: num_nodes must be >= 1, got {num_nodes}")
        if num_nodes >= self.num_nodes:
            return self
        return DraftTree(self.parents[:num_nodes], self.ranks[:num_nodes])

    def check_heads(self, num_heads: int | None = None, top_k: int | None = None) -> None:
        """Raise ValueError unless ``num_heads`` heads with ``top_k`` candidates each can fill the tree (None: any)."""
        for path in self.to_choices():
            if num_heads is not None and len(path) > num_heads:
                raise ValueError(f"DraftTree: path {path} is {len(path)} deep, but there are {num_heads} heads")
            if top_k is not None and path[-1] >= top_k:
                raise ValueError(f"DraftTree: path {path} has rank {path[-1]}, but top_k is {top_k}")

    @classmethod
    def from_parents(cls, parents: Sequence[int] | Tensor, ranks: Sequence[int] | Tensor | None = None) -> "DraftTree":
        """Make a tree from parent pointers; without ``ranks`` siblings get 0, 1, 2, … in node order."""
        parents = as_ints("parents", parents)
        check_parents(parents)
        return cls(parents, sibling_order(parents) if ranks is None else ranks)  # type: ignore[arg-type]

    @classmethod
    def chain(cls, num_drafts: int) -> "DraftTree":
        """Make a chain of ``num_drafts`` nodes below the root; 0 is a plain decode step."""
        if num_drafts < 0:
            raise ValueError(f"DraftTree.chain: num_drafts must be >= 0, got {num_drafts}")
        return cls(tuple(range(-1, num_drafts)), (0,) * (num_drafts + 1))

    @classmethod
    def from_choices(
        cls, choices: Iterable[Sequence[int]], *, num_heads: int | None = None, top_k: int | None = None
    ) -> "DraftTree":
        """Make a tree from Medusa choices: for each node below the root its path of child ranks.

        Args:
            choices: paths such as ``[0, 2]``, in any order. Nodes are numbered by ``(len(path), path)``, as Medusa
                numbers them.
            num_heads: when given, no path may be longer.
            top_k: when given, every rank must be below it.

        Raises:
            ValueError: an empty or repeated path, a missing prefix, a negative rank, a path too deep or of too high a
                rank; the message names the path.
            TypeError: a path that is not a sequence of integers.
        """
        paths = [as_ints(f"choices[{i}]", path) for i, path in enumerate(choices)]
        paths.sort(key=lambda path: (len(path), path))
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in paths:
            if not path:
                raise ValueError("DraftTree: choices must not list the root, got an empty path")
            if path in nodes:
                raise ValueError(f"DraftTree: path {list(path)} is listed twice in choices")
            if path[:-1] not in nodes:
                raise ValueError(f"DraftTree: path {list(path)} needs its prefix {list(path[:-1])} among the choices")
            nodes[path] = len(nodes)
        tree = cls((-1, *(nodes[path[:-1]] for path in paths)), (0, *(path[-1] for path in paths)))
        tree.check_heads(num_heads, top_k)
        return tree

    @classmethod
    def from_retrieve_indices(
        cls, table: Sequence[Sequence[int]] | Tensor, ranks: Sequence[int] | Tensor | None = None
    ) -> "DraftTree":
        """Make a tree from a table of leaf paths.

        Args:
            table: one row of node ids for each leaf, from the root on, −1 padded at its end; rows in any order. Rows
                of −1 alone are padding.
            ranks: child ranks by node; by default siblings get 0, 1, 2, … in node order.

        Raises:
            ValueError: a row that does not start at node 0, a −1 before a node, a node with two parents, a row that
                ends above a leaf or repeats another, a node id that no row has; the message names row or node.
        """
        rows = [as_ints(f"table[{i}]", row) for i, row in enumerate(table)]
        parents = parents_from_rows(rows)
        check_rows_end_in_leaves(rows, parents)
        return cls.from_parents(parents, ranks)

    @classmethod
    def from_dense_mask(cls, mask: Tensor, ranks: Sequence[int] | Tensor | None = None) -> "DraftTree":
        """Make a tree from an ancestor mask.

        Args:
            mask: ``(T, T) bool``; row *i* marks node *i* and its ancestors.
            ranks: child ranks by node; by default siblings get 0, 1, 2, … in node order.

        Raises:
            TypeError: not bool. ValueError: not square, not reflexive, a node that sees a later one or not the root,
                not transitive, or a node that sees two branches; the message names the nodes.
        """
        mask = torch.as_tensor(mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"DraftTree: mask must be bool, got {str(mask.dtype).removeprefix('torch.')}")
        if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or not mask.numel():
            raise ValueError(f"DraftTree: mask must have shape (T, T) with T >= 1, got {tuple(mask.shape)}")
        return cls.from_parents(parents_from_rows_of_mask(mask.tolist()), ranks)

    def to_choices(self) -> list[list[int]]:
        """Return the path of child ranks of every node below the root, in node order."""
        paths: list[list[int]] = [[]]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append([*paths[parent], rank])
        return paths[1:]

    def to_retrieve_indices(self, device: torch.device | str | None = None) -> Tensor:
        """Return the leaf paths, ``(leaves, N+1) int64``, padded with −1, by the leaf's node id."""
        width = self.max_depth + 1
        rows = [path + (-1,) * (width - len(path)) for path in map(self.path, self.leaves)]
        return torch.tensor(rows, dtype=torch.int64, device=device)

    def to_dense_mask(self, device: torch.device | str | None = None) -> Tensor:
        """Return the ancestor mask, ``(T, T) bool``: row *i* marks node *i* and its ancestors."""
        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask.to(device)

    def to_packed_mask(self, device: torch.device | str | None = None) -> Tensor:
        """Return the ancestor mask as bits, ``(T, W) int64``; see `pack_mask`."""
        return pack_mask(self.to_dense_mask()).to(device)

    def to_parents_tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Return ``parents`` as ``(T,) int32``."""
        return torch.tensor(self.parents, dtype=torch.int32, device=device)

    def to_depths_tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Return ``depths`` as ``(T,) int32``."""
        return torch.tensor(self.depths, dtype=torch.int32, device=device)

    def save(self, path: str | Path, /, **metadata) -> None:
        """Write the tree as JSON: ``{"choices": [...], ...metadata}``.

        ``parents`` is written too when the nodes are not numbered as `from_choices` would number them.

        Args:
            path: the file.
            metadata: JSON values to keep with the tree, such as ``source`` or ``expected_tokens_per_step``.
                ``num_heads`` and ``top_k`` are checked by `load`.

        Raises:
            ValueError: a metadata name that the tree itself uses, or a number JSON cannot hold.
            TypeError: a value JSON cannot hold.
        """
        clash = sorted(set(metadata) & set(_TREE_KEYS))
        if clash:
            raise ValueError(f"DraftTree.save: metadata must not be named {', '.join(clash)}")
        content: dict[str, object] = {"choices": self.to_choices()}
        if DraftTree.from_choices(self.to_choices()) != self:
            content["parents"] = list(self.parents)
        lines = [f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in (content | metadata).items()]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "DraftTree":
        """Read a tree from JSON with ``choices``, ``parents`` (and ``ranks``) or ``retrieve_indices`` (and ``ranks``).

        Raises:
            ValueError: not JSON, none of these keys, or not a valid tree; the message names the file.
        """
        content = _read_json(path)
        try:
            return _tree_from_json(content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def load_metadata(path: str | Path) -> dict:
    """Return what a tree's JSON file says besides the tree."""
    return {key: value for key, value in _read_json(path).items() if key not in _TREE_KEYS}


def _read_json(path: str | Path) -> dict:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(content).__name__}")
    return content


def _tree_from_json(content: dict) -> DraftTree:
    choices, ranks = content.get("choices"), content.get("ranks")
    if choices is not None:
        tree = DraftTree.from_choices(choices)
        if "parents" in content:
            tree = DraftTree.from_parents(content["parents"], [0, *(path[-1] for path in choices)])
            if tree.to_choices() != choices:
                raise ValueError("choices and parents are different trees; remove one of them")
    elif "parents" in content:
        tree = DraftTree.from_parents(content["parents"], ranks)
    elif "retrieve_indices" in content:
        tree = DraftTree.from_retrieve_indices(content["retrieve_indices"], ranks)
    else:
        raise ValueError(f"a tree needs choices, parents or retrieve_indices, got {', '.join(content) or 'nothing'}")
    tree.check_heads(content.get("num_heads"), content.get("top_k"))
    return tree
