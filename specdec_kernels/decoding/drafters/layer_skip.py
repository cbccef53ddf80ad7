"""Draft with the target itself, some of its blocks left out (Draft & Verify)."""

import json
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..._validate import check_range
from ...types import Verification
from ..drafting import ChainLayout, DraftContext, DrawnChain
from ..exits import ExitRule
from ..protocols import Draft, LayeredTarget, LayerPlan, TargetOutput

SKIP_FILE = "layer_skip.json"


class LayerSkipDrafter:
    """Draft a chain with the target, leaving out attention blocks and MLPs (Zhang et al. 2023, arXiv 2309.08168).

    The draft shares the target's cache: it attends to what the whole model cached for the past, and the rows that it
    writes for its own tokens are written again, in all layers, by the verification. No further weights, no further
    cache. With sampling, tokens are drawn from the skipping model's distribution, which `Draft.logits` reports.

    Args:
        skipped_attention: layers whose attention is left out while drafting.
        skipped_mlp: layers whose MLP is left out.
        max_drafts: the longest chain, at least 1.
        exit_rule: when a row stops earlier.

    Raises:
        ValueError: ``max_drafts`` is below 1, or at the first run: layers that the target does not have.

    Example:
        >>> drafter = LayerSkipDrafter(skipped_attention={3, 4, 7}, skipped_mlp={4}, max_drafts=6)
        >>> drafter.max_nodes
        7
    """

    def __init__(
        self,
        skipped_attention: Collection[int],
        skipped_mlp: Collection[int],
        *,
        max_drafts: int = 8,
        exit_rule: ExitRule | None = None,
    ):
        check_range("LayerSkipDrafter", "max_drafts", max_drafts, 1, 1023)
        self.plan = LayerPlan(
            skipped_attention=frozenset(map(int, skipped_attention)), skipped_mlp=frozenset(map(int, skipped_mlp))
        )
        self.max_drafts = max_drafts
        self.exit_rule = ExitRule() if exit_rule is None else exit_rule
        self.metadata: dict[str, Any] = {}
        # Where calibrations lie, too.
        self.folder: Path | None = None
        self._context: DraftContext | None = None

    @property
    def max_nodes(self) -> int:
        """The longest chain and its root."""
        return self.max_drafts + 1

    def bind(self, context: DraftContext) -> None:
        """Take the run whose target drafts."""
        if not hasattr(context.target, "run_layers"):
            raise TypeError(
                f"LayerSkipDrafter: the target must be able to run in part (LayeredTarget), got "
                f"{type(context.target).__name__}"
            )
        self._context = context

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Start a batch: every row begins with the rule's threshold."""
        device = prompt_ids.device
        self.exits = self.exit_rule.begin(len(prompt_ids), device)
        self._layout = ChainLayout(self.max_nodes, device)

    @torch.no_grad()
    def propose(self, pending: Tensor) -> Draft:
        """Return the chains below the pending tokens ``(B,) int64``, as long as the longest row's.

        Waits for the device once for each token: whether to go on is the rows' decision.

        Raises:
            RuntimeError: there was no `bind` and `begin`.
        """
        if self._context is None:
            raise RuntimeError("LayerSkipDrafter.propose: it works only inside decode, which calls bind and begin")
        target, layout = cast(LayeredTarget, self._context.target), self._layout
        chain = DrawnChain(self._context, layout, pending, self.max_nodes)
        while chain.wants_more():
            last = chain.length - 1
            mask, depths = layout.mask(chain.length), layout.depths(chain.length)[:, last:]
            output = target.run_layers(chain.last[:, None], mask, depths, self.plan, first_node=last)
            chain.extend(output.logits[:, 0], self.exits.threshold)
        return self.exits.watch(chain.draft())

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Move the thresholds."""
        self.exits.settle(verification, active)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, exit_rule: ExitRule | None = None) -> "LayerSkipDrafter":
        """Load what `save_pretrained` or ``specdec-kernels search layers`` wrote.

        Args:
            path: the file, or the folder that holds ``layer_skip.json``.
            exit_rule: overrides the stored one.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file does not hold skip sets.
        """
        path = Path(path) / SKIP_FILE if Path(path).is_dir() else Path(path)
        entry = json.loads(path.read_text())
        if not isinstance(entry, dict) or not {"skipped_attention", "skipped_mlp"} <= entry.keys():
            raise ValueError(f"LayerSkipDrafter: {path} must hold skipped_attention and skipped_mlp")
        rule_names = [field.name for field in fields(ExitRule)]
        names = ("skipped_attention", "skipped_mlp", "max_drafts", *rule_names)
        rule = exit_rule or ExitRule(**{name: entry[name] for name in rule_names if name in entry})
        drafter = cls(
            entry["skipped_attention"], entry["skipped_mlp"], max_drafts=entry.get("max_drafts", 8), exit_rule=rule
        )
        drafter.metadata = {name: value for name, value in entry.items() if name not in names}
        drafter.folder = path.parent
        return drafter

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``layer_skip.json`` into a folder: the skip sets, the longest chain, the exit rule, the metadata.

        Of the rule, the threshold and whatever is not as by default.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        entry = {
            "skipped_attention": sorted(self.plan.skipped_attention),
            "skipped_mlp": sorted(self.plan.skipped_mlp),
            "max_drafts": self.max_drafts,
            "threshold": self.exit_rule.threshold,
            **{name: value for name, value in vars(self.exit_rule).items() if value != getattr(ExitRule, name)},
            **self.metadata,
        }
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in entry.items())
        (Path(folder) / SKIP_FILE).write_text(f"{{\n{lines}\n}}\n")
