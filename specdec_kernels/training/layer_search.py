"""Search which blocks a self-speculating model leaves out while drafting (Draft & Verify): Bayesian optimisation.

The objective is the expected tokens/s, from costs that are measured once and from the drafts that match, which are
counted: the same skip set has the same value whenever it is tried.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..decoding.drafters.layer_skip import LayerSkipDrafter
from ..decoding.drafting import ChainLayout
from ..decoding.exits import ExitRule
from ..decoding.protocols import LayerPlan
from ..hf.load import load_model
from ..hf.target import HFTarget
from .data import GenerationOptions, generate_conversations, is_held_out
from .generate import Conversation
from .layer_costs import BlockCosts, Expectation, Outcome, expectation, measure_costs
from .medusa import base_model_name


@dataclass(frozen=True)
class SearchOptions:
    """What is searched; a study is continued only with the same options.

    Attributes:
        num_contexts: places in the model's own answers from which every skip set drafts.
        max_context: longest of them, in tokens.
        max_drafts: drafts from each.
        seed: of the sampler and of the places.
    """

    num_contexts: int = 64
    max_context: int = 256
    max_drafts: int = 8
    seed: int = 0


class DraftProbe:
    """Contexts in a target's cache, all in one batch, from which any skip set can draft.

    Args:
        model: the causal LM.
        contexts: token ids.
        max_drafts: ``N``, drafts from each context.
    """

    def __init__(self, model, contexts: Sequence[Sequence[int]], max_drafts: int):
        lengths = torch.tensor([len(context) for context in contexts], dtype=torch.int32, device=model.device)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(context) for context in contexts], batch_first=True)
        self.max_drafts = max_drafts
        self._target = HFTarget(model, len(contexts), ids.shape[1] + max_drafts)
        self._pending = self._target.prefill(ids.to(model.device), lengths).logits[:, 0].argmax(-1)
        self._layout = ChainLayout(max_drafts, model.device)
        self._truth, _ = self._draft(LayerPlan(), max_drafts)

    def outcome(self, plan: LayerPlan, num_drafts: int | None = None) -> Outcome:
        """Draft greedily with a skip set, and compare with what the whole model says."""
        count = self.max_drafts if num_drafts is None else num_drafts
        ids, probs = self._draft(plan, count)
        matched = (ids == self._truth[:, :count]).long().cumprod(1).sum(1)
        return Outcome(matched.cpu(), probs.cpu())

    def _draft(self, plan: LayerPlan, count: int) -> tuple[Tensor, Tensor]:
        """Return ``(B, count)`` ids and probabilities. Nothing is committed, so the contexts stay as they are."""
        ids, probs = [self._pending], []
        for last in range(count):
            mask, depths = self._layout.mask(last + 1), self._layout.depths(last + 1)[:, last:]
            output = self._target.run_layers(ids[-1][:, None], mask, depths, plan, first_node=last)
            best, token = output.logits[:, 0].float().max(-1)
            probs.append((best - output.logits[:, 0].float().logsumexp(-1)).exp())
            ids.append(token)
        return torch.stack(ids[1:], dim=1), torch.stack(probs, dim=1)


def choose_contexts(
    conversations: Sequence[Conversation], options: SearchOptions, *, held_out: bool
) -> list[tuple[int, ...]]:
    """Cut conversations somewhere in their answers; greedy answers first, since greedy drafts are counted.

    Raises:
        ValueError: there is none.
    """
    generator = torch.Generator().manual_seed(options.seed)
    contexts = []
    for c in sorted(conversations, key=lambda c: (not c.greedy, c.index)):
        cut = int(torch.randint(len(c.answer), (), generator=generator))
        context = c.prompt + c.answer[:cut]
        if is_held_out(c) == held_out and len(context) <= options.max_context:
            contexts.append(context)
    if not contexts:
        part = "held-out" if held_out else "other"
        raise ValueError(f"no {part} context of at most {options.max_context} tokens; ask for more tokens")
    return contexts[: options.num_contexts]


def uniform_plan(like: LayerPlan, num_layers: int) -> LayerPlan:
    """Return a plan that skips as many blocks of each kind, spread evenly over the layers."""

    def spread(count: int) -> frozenset[int]:
        return frozenset(int((i + 0.5) * num_layers / count) for i in range(count))

    return LayerPlan(skipped_attention=spread(len(like.skipped_attention)), skipped_mlp=spread(len(like.skipped_mlp)))


def first_guesses(probe: DraftProbe, costs: BlockCosts) -> list[LayerPlan]:
    """Return plans to try first: the blocks that change the next token least for their cost, more and more of them."""
    num_layers = len(costs.attention_us)
    blocks = [(kind, layer) for kind in ("attention", "mlp") for layer in range(num_layers)]
    gains = []
    for kind, layer in tqdm(blocks, desc="single blocks", unit="block"):
        outcome = probe.outcome(_plan([(kind, layer)]), num_drafts=1)
        cost_us = (costs.attention_us if kind == "attention" else costs.mlp_us)[layer]
        gains.append((1.0 - float(outcome.matched.double().mean()) + 1e-3) / max(cost_us, 1e-3))
    ranked = [block for _, block in sorted(zip(gains, blocks, strict=True))]
    sizes = sorted({max(1, round(share * len(blocks))) for share in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)})
    return [_plan(ranked[:size]) for size in sizes]


def search_layers(
    probe: DraftProbe, costs: BlockCosts, storage: str, options: SearchOptions, num_trials: int
) -> tuple[LayerPlan, Expectation, int]:
    """Search until the study has ``num_trials`` trials, those of earlier runs included.

    Args:
        probe: drafts.
        costs: of this machine.
        storage: where optuna keeps the study, for example ``sqlite:///study.db``.
        options: of the search.
        num_trials: in all.

    Returns:
        The best plan, what is expected of it, and the number of trials.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=storage, study_name="layers", load_if_exists=True, direction="maximize")
    done = len(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)))
    # The sampler's state is not stored; a continued run must not repeat the draws of the first.
    study.sampler = optuna.samplers.TPESampler(
        seed=options.seed + done, multivariate=True, warn_independent_sampling=False
    )
    num_layers = len(costs.attention_us)
    if not done:
        for guess in first_guesses(probe, costs):
            study.enqueue_trial(_parameters(guess, num_layers))
    with tqdm(total=num_trials, initial=done, unit="trial", desc="searching") as bar:

        def objective(trial: Any) -> float:
            plan = LayerPlan(
                skipped_attention=_suggested(trial, "attention", num_layers),
                skipped_mlp=_suggested(trial, "mlp", num_layers),
            )
            return expectation(probe.outcome(plan), costs, costs.draft_us(plan)).tokens_per_s

        def report(study: Any, _: Any) -> None:
            bar.update(1)
            bar.set_postfix(best=f"{study.best_value:.2f} tok/s")

        study.optimize(objective, n_trials=max(0, num_trials - done), callbacks=[report])
    names = {name for name, is_skipped in study.best_params.items() if is_skipped}
    plan = _plan([(name.rpartition("_")[0], int(name.rpartition("_")[2])) for name in names])
    return plan, expectation(probe.outcome(plan), costs, costs.draft_us(plan)), max(done, num_trials)


def _suggested(trial: Any, kind: str, num_layers: int) -> frozenset[int]:
    return frozenset(i for i in range(num_layers) if trial.suggest_categorical(f"{kind}_{i}", [False, True]))


def _parameters(plan: LayerPlan, num_layers: int) -> dict[str, bool]:
    sets = {"attention": plan.skipped_attention, "mlp": plan.skipped_mlp}
    return {f"{kind}_{i}": i in skipped for kind, skipped in sets.items() for i in range(num_layers)}


def _plan(blocks: Sequence[tuple[str, int]]) -> LayerPlan:
    return LayerPlan(
        skipped_attention=frozenset(layer for kind, layer in blocks if kind == "attention"),
        skipped_mlp=frozenset(layer for kind, layer in blocks if kind == "mlp"),
    )


def search_skip_sets(
    out: str | Path, work: str | Path, generation: GenerationOptions, options: SearchOptions, *, num_trials: int,
    num_tokens: int, num_slots: int = 32, num_workers: int = 1, device: str = "cpu", command: str = "",
) -> LayerSkipDrafter:  # fmt: skip
    """Make the data, measure the costs, search, check on held-out contexts, and save.

    Args:
        out: folder that gets ``layer_skip.json``.
        work: folder of the data, the costs and the study; a search stopped half-way goes on.
        generation: model, prompts and sampling.
        options: of the search.
        num_trials: skip sets to try, those of earlier runs included.
        num_tokens: answer tokens to take contexts from.
        num_slots, num_workers: of the generation, see `generate_conversations`.
        device: of everything.
        command: written to the result.

    Returns:
        The drafter that was saved.

    Raises:
        ValueError: the work folder holds a search with other options, or too few texts.
    """
    work = Path(work)
    conversations = generate_conversations(
        work, generation, num_tokens=num_tokens, num_slots=num_slots, num_workers=num_workers, device=device
    )
    model = load_model(generation.model, getattr(torch, generation.dtype), device)
    costs = stored_costs(work / "costs.json", model, options)
    probe = DraftProbe(model, choose_contexts(conversations, options, held_out=False), options.max_drafts)
    plan, expected, tried = search_layers(probe, costs, f"sqlite:///{work / 'study.db'}", options, num_trials)
    drafter = LayerSkipDrafter(
        plan.skipped_attention, plan.skipped_mlp, max_drafts=expected.max_drafts,
        exit_rule=ExitRule(threshold=expected.threshold),
    )  # fmt: skip
    held_out = DraftProbe(model, choose_contexts(conversations, options, held_out=True), options.max_drafts)
    report = _report(held_out, costs, plan)
    drafter.metadata = {
        "base_model_name_or_path": base_model_name(generation.model), "searched": expected._asdict(), **report,
        "num_trials": tried, "command": command,
    }  # fmt: skip
    drafter.save_pretrained(out)
    print(format_report(drafter.metadata))
    return drafter


def stored_costs(path: Path, model, options: SearchOptions) -> BlockCosts:
    """Return the costs that a search began with; measure and store them when it begins.

    Raises:
        ValueError: the file belongs to a search with other options.
    """
    if path.exists():
        found = json.loads(path.read_text())
        if found["options"] != asdict(options):
            raise ValueError(f"{path.parent} holds a search with other options; use another --work folder")
        return BlockCosts(**{name: _tupled(value) for name, value in found["costs"].items()})
    costs = measure_costs(model, context_len=options.max_context, max_drafts=options.max_drafts)
    path.write_text(json.dumps({"options": asdict(options), "costs": asdict(costs)}, indent=1) + "\n")
    return costs


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _report(probe: DraftProbe, costs: BlockCosts, plan: LayerPlan) -> dict[str, Any]:
    """Return what the plan, and a uniform one with as many blocks, do in held-out contexts."""
    plans = {"held_out": plan, "uniform_held_out": uniform_plan(plan, len(costs.attention_us))}
    entries: dict[str, Any] = {"plain_tokens_per_s": 1e6 / costs.verify_us[0], "draft_us": costs.draft_us(plan)}
    for name, candidate in plans.items():
        outcome = probe.outcome(candidate)
        entries[name] = {
            **expectation(outcome, costs, costs.draft_us(candidate))._asdict(),
            "mean_matched": float(outcome.matched.double().mean()),
            "first_draft_right": float((outcome.matched > 0).double().mean()),
        }
    return entries


def format_report(metadata: dict[str, Any]) -> str:
    """Return a table for people."""
    rows = [("searched skip sets", metadata["held_out"]), ("uniform, as many blocks", metadata["uniform_held_out"])]
    lines = [f"{'on held-out contexts':<26}{'tokens/s':>10}{'tokens/step':>13}{'first right':>13}{'matched':>9}"]
    lines.append(f"{'plain decoding':<26}{metadata['plain_tokens_per_s']:>10.1f}{1.0:>13.2f}")
    for name, entry in rows:
        numbers = f"{entry['tokens_per_s']:>10.1f}{entry['tokens_per_step']:>13.2f}"
        lines.append(f"{name:<26}{numbers}{entry['first_draft_right']:>13.3f}{entry['mean_matched']:>9.2f}")
    return "\n".join(lines)
