"""One controller for each drafter: what was learned of one drafter is not held against another.

The sequences of one step may have different drafters. Each drafter has its own acceptance, draft costs and loss budget. All
share what is known of the target: a plain step is the same for every drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outrider.control.controllers import Adaptive
from outrider.control.costs import Costs, TargetCosts
from outrider.core.types import Budget, Draft, Step, Verdict, ints


class TargetShare:
    """The costs of the target for the sequences of one drafter, in a batch that has others.

    They take their share of a plain step. Verification costs a draft what it adds to the step; sequences that are drafted for
    together share that.
    """

    def __init__(self, whole: TargetCosts) -> None:
        """whole: the costs of whole steps. It is observed by `PerDrafter`, once a step."""
        self.whole = whole
        self.others = 0  # sequences of other drafters in the step
        self.drafting = 0  # how many of them are drafted for

    @property
    def plain_gaps(self) -> tuple[int, int]:
        return self.whole.plain_gaps

    def plain(self, batch_size: int) -> float | None:
        total = batch_size + self.others
        plain = self.whole.plain(total)
        return None if plain is None else plain * batch_size / total

    def forget_plain(self, batch_size: int) -> None:
        self.whole.forget_plain(batch_size + self.others)

    def verified(self, batch_size: int, came: Sequence[float]) -> float:
        total = batch_size + self.others
        plain = self.whole.plain(total)
        assert plain is not None
        extra = self.whole.verified(total, came) - plain
        return plain * batch_size / total + extra * batch_size / (batch_size + self.drafting)

    def observe(self, step: Step, nodes: int) -> None:
        """Nothing: `whole` has seen the whole step."""


class PerDrafter:
    """A controller that keeps an `Adaptive` for each drafter.

    A drafter that is new starts with what is known of the target, and with a first look of its own.
    """

    def __init__(
        self,
        base: Adaptive,
        name: str,
        method_of: Callable[[int], str],
        draft_seconds: Callable[[], Mapping[str, float]],
    ) -> None:
        """base: the controller of the drafter `name`, which is taken over; all share its limit and its target's costs.
        method_of: the name of a slot's drafter, "none" for none. draft_seconds: of the last step, by drafter."""
        self.limit, self.target = base.limit, base.costs.target
        self.method_of, self.draft_seconds = method_of, draft_seconds
        self.controllers: dict[str, Adaptive] = {name: base}
        base.costs.target = TargetShare(self.target)
        self._shares: dict[str, TargetShare] = {name: base.costs.target}

    def budgets(self, slots: list[int]) -> list[Budget]:
        if not self.limit.max_nodes:
            return [self.limit] * len(slots)
        groups = self._grouped(slots)
        for name, own in groups.items():
            controller, share = self._controller(name), self._shares[name]
            if share.others != len(slots) - len(own):
                share.others = len(slots) - len(own)
                controller.reconsider()
            controller.prepare(own)
        # Plain decoding can only be measured in steps that nobody drafts in. The other controllers wait.
        measuring = [name for name in groups if self.controllers[name].measures_plain]
        chosen: dict[int, Budget] = {}
        for name in measuring or groups:
            chosen |= zip(groups[name], self.controllers[name].budgets(groups[name]), strict=True)
        drafted = {name: sum(chosen.get(slot, _NONE).depth > 0 for slot in own) for name, own in groups.items()}
        for name in groups:
            self._shares[name].drafting = sum(drafted.values()) - drafted[name]
        return [chosen.get(slot, _NONE) for slot in slots]

    def observe(self, step: Step) -> None:
        if not self.limit.max_nodes:
            return
        drafted = any(b.depth for b in step.budgets)
        self.target.observe(step, step.draft.nodes - 1 if drafted else 0)
        groups = self._grouped(step.slots)
        for name, own in groups.items():
            part = step if len(own) == len(step.slots) else self._part(step, name, own, drafted)
            self._controller(name).observe(part)

    def release(self, slot: int) -> None:
        for controller in self.controllers.values():
            controller.release(slot)

    def _grouped(self, slots: Sequence[int]) -> dict[str, list[int]]:
        """Slots by drafter, those without one left out."""
        groups: dict[str, list[int]] = {}
        for slot in slots:
            groups.setdefault(self.method_of(slot), []).append(slot)
        groups.pop("none", None)
        return groups

    def _controller(self, name: str) -> Adaptive:
        if name not in self.controllers:
            self._shares[name] = TargetShare(self.target)
            self.controllers[name] = Adaptive(self.limit, Costs(self._shares[name]))
        return self.controllers[name]

    def _part(self, step: Step, name: str, own: Sequence[int], drafted: bool) -> Step:
        """What one drafter's controller sees of a step: its own slots, and the seconds that they account for.

        They take their share of a plain step. What verification took beyond a plain step is divided by draft tokens.
        """
        at = [b for b, slot in enumerate(step.slots) if slot in set(own)]
        share, draft = len(at) / len(step.slots), step.seconds["draft"]
        rest, counts = sum(step.seconds.values()) - draft, ints(step.draft.num_draft_tokens)
        nodes = max(counts[b] for b in at)
        plain = self.target.plain(len(step.slots))
        if drafted:
            timed = {n: s for n, s in self.draft_seconds().items() if n in self.controllers}
            draft = timed.get(name, 0.0) + share * max(draft - sum(timed.values()), 0.0)
        else:
            draft *= share
        beyond = max(rest - plain, 0.0) if drafted and plain is not None else 0.0
        weight = sum(counts[b] for b in at) / sum(counts) if sum(counts) else share
        tokens, parents = step.draft.tokens[at, : nodes + 1], step.draft.parents[at, : nodes + 1]
        confidence = None if step.draft.confidence is None else step.draft.confidence[at, : nodes + 1]
        verdict = Verdict(step.verdict.path[at], step.verdict.accepted[at], step.verdict.token[at])
        return replace(
            step,
            draft=Draft(tokens, parents, confidence=confidence),
            verdict=verdict,
            commits=[step.commits[b] for b in at],
            slots=[step.slots[b] for b in at],
            positions=[step.positions[b] for b in at],
            budgets=[step.budgets[b] for b in at],
            seconds={"draft": draft, "target": (rest - beyond) * share + beyond * weight},
            logits=None,
        )


_NONE = Budget(0)
