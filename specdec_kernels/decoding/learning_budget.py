"""A budget that learns, while a text is decoded, how well that text is drafted."""

from collections.abc import Collection, Iterable

from .budget import NodeBudget, fastest


class LearningBudget:
    """Choose the size of the drafts as a `NodeBudget` does, but by how the running texts are drafted.

    Some texts are drafted much better or worse than those of a calibration. So the gains begin as the budget's and
    follow, step by step, what is accepted: an exponential average over the rows of the steps,

        gains[i]  ←  gains[i] + rate · ([node i was accepted] − gains[i])        for 1 ≤ i < T

    What a draft of T nodes accepts also tells what its first 1, 2, … T − 1 nodes would have: the sum of the first t
    gains is the average of the tokens per step of drafts of t nodes. Larger drafts are not seen. They are therefore
    tried now and then, one step each: the size that would be best if twice as many drafts were accepted as in the
    calibration, as soon as the steps since the last such draft have taken ``1 / probe_share`` times what it costs
    beyond the size that seems best. So trials cost at most that share of the time, after plain decoding, too; where
    even such luck would not pay, there are none.

    Only the size of drafts depends on what was accepted before, so texts stay exact.

    Args:
        budget: gives the gains to begin with, the sizes, and the times of steps.
        rate: of the average: ``1 / rate`` row-steps are remembered.
        probe_share: of the time, in (0, 1), that may go into trials.

    Raises:
        ValueError: ``rate`` or ``probe_share`` is not in (0, 1).

    Example:
        >>> calibrated = NodeBudget([1, 0.9, 0.8], lambda nodes, rows, context: 100 + 50 * nodes)
        >>> budget, sizes = LearningBudget(calibrated, rate=0.5), []
        >>> for accepted in ([1, 2], [], [], []):
        ...     sizes.append(budget.choose(num_rows=1, context_len=64))
        ...     budget.observe(sizes[-1], [accepted])
        >>> sizes
        [3, 3, 3, 1]
    """

    def __init__(self, budget: NodeBudget, *, rate: float = 1 / 32, probe_share: float = 0.03):
        for name, value in (("rate", rate), ("probe_share", probe_share)):
            if not 0 < value < 1:
                raise ValueError(f"LearningBudget: {name} must be in (0, 1), got {value}")
        self.budget, self.rate, self.probe_share = budget, rate, probe_share
        self.begin()

    def begin(self) -> None:
        """Forget what was learned: new texts."""
        self.gains = list(self.budget.gains)
        self._unprobed_us = 0.0

    def choose(self, num_rows: int, context_len: int) -> int:
        """Return the best size by what is known; sometimes, to know more, a larger one."""
        budget = self.budget
        times = budget.times_us(num_rows, context_len)
        best = fastest(self.gains, times)
        probe = fastest([1.0, *(min(1.0, 2 * gain) for gain in budget.gains[1:])], times)
        chosen = best
        if probe > best and self._unprobed_us * self.probe_share >= times[probe] - times[best]:
            chosen = probe
        self._unprobed_us = 0.0 if chosen >= probe else self._unprobed_us + times[chosen]
        return chosen

    def observe(self, num_nodes: int, accepted: Iterable[Collection[int]]) -> None:
        """Learn from a step.

        Args:
            num_nodes: that its drafts were allowed.
            accepted: the nodes that each row accepted of its draft.
        """
        for path in accepted:
            for node in range(1, min(num_nodes, len(self.gains))):
                self.gains[node] += self.rate * ((node in path) - self.gains[node])
