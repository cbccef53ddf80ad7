"""Search which blocks a self-speculating model leaves out while drafting (Draft & Verify): Bayesian optimisation.

The objective is the expected tokens/s, from costs that are measured once and from the drafts that match, which are
counted: the same skip set has the same value whenever it is tried.
"""

import importlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..decoding.drafters.layer_skip import LayerSkipDrafter
from ..decoding.exits import ExitRule
from ..decoding.protocols import LayerPlan
from ..hf.load import load_model
from ..hf.prepare import is_prepared, prepare
from ._differences import differences
from .data import GenerationOptions, generate_conversations
from .layer_costs import BlockCosts, Expectation, best_expectation, expectation, measure_costs
from .layer_probe import DraftProbe, SearchOptions, choose_contexts
from .medusa import base_model_name


def uniform_plan(like: LayerPlan, num_layers: int) -> LayerPlan:
    """Return a plan that skips as many blocks of each kind, spread evenly over the layers."""

    def spread(count: int) -> frozenset[int]:
        return frozenset(int((i + 0.5) * num_layers / count) for i in range(count))

    return LayerPlan(skipped_attention=spread(len(like.skipped_attention)), skipped_mlp=spread(len(like.skipped_mlp)))


def first_guesses(probe: DraftProbe, costs: BlockCosts) -> list[LayerPlan]:
    """Return plans to try first: the blocks that change the next token least for their cost, more and more of them.

    With each of them the one that spreads as many blocks evenly, so that the search never ends behind those.
    """
    num_layers = len(costs.attention_us)
    blocks = [(kind, layer) for kind in ("attention", "mlp") for layer in range(num_layers)]
    gains = []
    for kind, layer in tqdm(blocks, desc="single blocks", unit="block"):
        outcome = probe.outcome(_plan([(kind, layer)]), num_drafts=1)
        cost_us = (costs.attention_us if kind == "attention" else costs.mlp_us)[layer]
        gains.append((1.0 - float(outcome.matched.double().mean()) + 1e-3) / max(cost_us, 1e-3))
    ranked = [block for _, block in sorted(zip(gains, blocks, strict=True))]
    sizes = sorted({max(1, round(share * len(blocks))) for share in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)})
    plans = [_plan(ranked[:size]) for size in sizes]
    return [plan for ranking in plans for plan in (ranking, uniform_plan(ranking, num_layers))]


def search_layers(
    probe: DraftProbe, costs: BlockCosts, file: str | Path, options: SearchOptions, num_trials: int
) -> tuple[LayerPlan, Expectation, int]:
    """Search until ``num_trials`` skip sets were tried, those of earlier runs included.

    The sampler looks at each block by itself, so every second set is a neighbour of the best one so far.

    Args:
        probe: drafts.
        costs: of this machine.
        file: JSON lines, one for each trial; what is in there is taken as tried.
        options: of the search.
        num_trials: in all.

    Returns:
        The best plan, what is expected of it, and the number of trials.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    num_layers = len(costs.attention_us)
    trials = _Trials(Path(file))
    # The sampler's state is not stored; a continued run must not repeat the draws of the first.
    sampler = optuna.samplers.TPESampler(seed=options.seed + len(trials.entries))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    generator = random.Random(options.seed + len(trials.entries))
    choice = optuna.distributions.CategoricalDistribution([False, True])
    for plan, value in trials.entries:
        parameters = _parameters(plan, num_layers)
        study.add_trial(
            optuna.trial.create_trial(params=parameters, distributions=dict.fromkeys(parameters, choice), value=value)
        )
    if not trials.entries:
        for guess in first_guesses(probe, costs):
            study.enqueue_trial(_parameters(guess, num_layers))
    with tqdm(total=num_trials, initial=len(trials.entries), unit="trial", desc="searching") as bar:

        def objective(trial: Any) -> float:
            plan = LayerPlan(
                skipped_attention=_suggested(trial, "attention", num_layers),
                skipped_mlp=_suggested(trial, "mlp", num_layers),
            )
            value = best_expectation(probe.outcome(plan), costs, costs.draft_us(plan)).tokens_per_s
            trials.add(plan, value)
            bar.update(1)
            bar.set_postfix(best=f"{trials.best[1]:.2f} tok/s")
            return value

        def propose(study: Any, trial: Any) -> None:
            if trial.number % 2:
                study.enqueue_trial(_parameters(trials.neighbour(generator, num_layers), num_layers))

        study.optimize(objective, n_trials=max(0, num_trials - len(trials.entries)), callbacks=[propose])
    plan = trials.best[0]
    return plan, best_expectation(probe.outcome(plan), costs, costs.draft_us(plan)), len(trials.entries)


class _Trials:
    """The skip sets that were tried, and their values; appended to a file as they come.

    An SQL study would commit each of its 2L parameters by itself, which takes longer than the trial.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries: list[tuple[LayerPlan, float]] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:  # an interruption cut it off
                continue
            plan = LayerPlan(
                skipped_attention=frozenset(found["skipped_attention"]), skipped_mlp=frozenset(found["skipped_mlp"])
            )
            self.entries.append((plan, found["tokens_per_s"]))

    @property
    def best(self) -> tuple[LayerPlan, float]:
        """The first one with the highest value."""
        return max(self.entries, key=lambda entry: entry[1])

    def neighbour(self, generator: random.Random, num_layers: int) -> LayerPlan:
        """Return the best plan with one or two blocks changed; one that was not tried, if it can be found."""
        tried = {plan for plan, _ in self.entries}
        best = _parameters(self.best[0], num_layers)
        for _ in range(100):
            changed = generator.sample(sorted(best), generator.choice((1, 2)))
            flipped = best | {name: not best[name] for name in changed}
            names = [name.split("_") for name, is_skipped in flipped.items() if is_skipped]
            plan = _plan([(kind, int(layer)) for kind, layer in names])
            if plan not in tried:
                break
        return plan

    def add(self, plan: LayerPlan, value: float) -> None:
        self.entries.append((plan, value))
        entry = {
            "skipped_attention": sorted(plan.skipped_attention),
            "skipped_mlp": sorted(plan.skipped_mlp),
            "tokens_per_s": value,
        }
        with open(self.path, "a", encoding="utf-8") as file:
            # A line that was cut off must not swallow this one.
            file.write(("" if file.tell() == 0 else "\n") + json.dumps(entry))


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
    num_tokens: int, prepared: bool = False, num_slots: int = 32, num_workers: int = 1, device: str = "cpu",
    command: str = "",
) -> LayerSkipDrafter:  # fmt: skip
    """Make the data, measure the costs, search, check on held-out contexts, and save.

    Args:
        out: folder that gets ``layer_skip.json``.
        work: folder of the data, the costs and the study; a search stopped half-way goes on.
        generation: model, prompts and sampling.
        options: of the search.
        num_trials: skip sets to try, those of earlier runs included.
        num_tokens: answer tokens to take contexts from.
        prepared: search for a model after `hf.prepare`, whose blocks cost less.
        num_slots, num_workers: of the generation, see `generate_conversations`.
        device: of everything.
        command: written to the result.

    Returns:
        The drafter that was saved.

    Raises:
        ValueError: the work folder holds a search with other options, or too few texts.
        NotImplementedError, RuntimeError: the model cannot be prepared.
    """
    importlib.import_module("optuna")  # Missing, it is better missed now than after minutes.
    work = Path(work)
    conversations = generate_conversations(
        work, generation, num_tokens=num_tokens, num_slots=num_slots, num_workers=num_workers, device=device
    )
    places, held_out_places = (choose_contexts(conversations, options, held_out=held_out) for held_out in (False, True))
    model = load_model(generation.model, getattr(torch, generation.dtype), device)
    model = prepare(model) if prepared else model
    costs = stored_costs(work / "costs.json", model, options)
    probe = DraftProbe(model, places, options.max_drafts)
    plan, expected, tried = search_layers(probe, costs, work / "trials.jsonl", options, num_trials)
    drafter = LayerSkipDrafter(
        plan.skipped_attention, plan.skipped_mlp, max_drafts=expected.max_drafts,
        exit_rule=ExitRule(threshold=expected.threshold),
    )  # fmt: skip
    held_out = DraftProbe(model, held_out_places, options.max_drafts)
    report = _report(probe, held_out, costs, plan)
    drafter.metadata = {
        "base_model_name_or_path": base_model_name(generation.model), "prepared": prepared,
        "searched": expected._asdict(), **report,
        "num_contexts": len(places), "num_held_out_contexts": len(held_out_places),
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
    chosen = {**asdict(options), "prepared": is_prepared(model)}
    if path.exists():
        found = json.loads(path.read_text())
        if different := differences(found["options"], chosen):
            raise ValueError(f"{path.parent} holds a search with another {different}; use another --work folder")
        return BlockCosts(**{name: _tupled(value) for name, value in found["costs"].items()})
    costs = measure_costs(model, context_len=options.max_context, max_drafts=options.max_drafts)
    path.write_text(json.dumps({"options": chosen, "costs": asdict(costs)}, indent=1) + "\n")
    return costs


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _report(probe: DraftProbe, held_out: DraftProbe, costs: BlockCosts, plan: LayerPlan) -> dict[str, Any]:
    """Return what the plan, and a uniform one with as many blocks, do in held-out contexts.

    Both with the longest chain and the threshold that were best in the contexts of the search.
    """
    plans = {"held_out": plan, "uniform_held_out": uniform_plan(plan, len(costs.attention_us))}
    entries: dict[str, Any] = {"plain_tokens_per_s": 1e6 / costs.verify_us[0], "draft_us": costs.draft_us(plan)}
    for name, candidate in plans.items():
        draft_us, outcome = costs.draft_us(candidate), held_out.outcome(candidate)
        chosen = best_expectation(probe.outcome(candidate), costs, draft_us)
        expected = expectation(outcome, costs, draft_us, max_drafts=chosen.max_drafts, threshold=chosen.threshold)
        entries[name] = {
            **expected._asdict(),
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
    if metadata["held_out"]["tokens_per_s"] <= metadata["plain_tokens_per_s"]:
        lines.append("plain decoding is expected to be faster here: drafting by this model costs more than it brings")
    return "\n".join(lines)
