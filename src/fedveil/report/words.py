"""Figures in words: numbers as a person reads them, and what the runs show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedveil.core.metrics import VALIDATION, Primary
from fedveil.core.outcome import best_row
from fedveil.report.figures import size
from fedveil.report.folder import Run
from fedveil.report.groups import Group
from fedveil.runs.statistics import Repeats

FEW = 3  # recipes that are compared with the best one in a sentence each
POINT = 0.01 + 1e-9  # one point of accuracy, and what rounding may take from it


def near(primary: Primary, best: float) -> tuple[float, str]:
    """A level of a metric that is about as good as the best one, and how far from it in words."""
    apart = POINT if primary.share else POINT * abs(best)
    words = "one point" if primary.percent else "0.01" if primary.share else "1%"
    return best - apart if primary.maximise else best + apart, words


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.3g}\N{NO-BREAK SPACE}s"
    return f"{minutes}\N{NO-BREAK SPACE}min" if minutes < 100 else f"{seconds / 3600:,.1f}\N{NO-BREAK SPACE}h"


def plural(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def verdict(runs: Sequence[Run]) -> str:
    """What the runs show, in one paragraph."""
    primary = runs[0].primary
    measured = sorted((run for run in runs if run.values), key=lambda run: run.values[-1], reverse=primary.maximise)
    said = []
    if len(runs) == 1 and measured:
        said += _alone(runs[0])
    elif measured:
        said += _compared(measured)
    said += [f"{run.name} has no measured {primary.words} yet." for run in runs if not run.values]
    said += [f"{run.name} stopped early: {_stalled(run)}." for run in runs if run.ended == "early"]
    said += [_unfinished(run) for run in runs if run.unfinished]
    said += [f"The audit of {run.name} contradicts what it promises." for run in runs if run.audit and run.audit.broken]
    if any(run.setting != runs[0].setting for run in runs):
        said.append("The runs differ in task or split, so compare them with care.")
    return " ".join(said)


def conclusion(groups: Sequence[Group]) -> str:
    """What recipes that ran with several seeds show, in one paragraph."""
    primary = groups[0].runs[0].primary
    found = [each for group in groups if (each := group.repeats()).spread()]
    if not found:
        return f"No run has a measured {primary.words} yet."
    sign = -1 if primary.maximise else 1
    best = min(found, key=lambda each: sign * _mean(each))
    said = [f"{best.name} has the best mean test {primary.words}, {_spread(best)}."]
    if len(found) == 1:
        said = [f"{best.name} reached a test {primary.words} of {_spread(best)}."]
    others = [each for each in found if each is not best]
    if len(others) > FEW:
        said += _sorted_out(others, best)
    else:
        for each in others:
            difference = each.difference(best)
            told = difference.show(primary) if difference else "not enough common seeds for an interval"
            said.append(f"{each.name} against it: {told}.")
    runs = [run for group in groups for run in group.runs]
    said += [f"The audit of {run.name} contradicts what it promises." for run in runs if run.audit and run.audit.broken]
    if unfinished := [run.name for run in runs if run.unfinished]:
        said.append(f"{plural(len(unfinished), 'run')} of {len(runs)} not finished.")
    if any(run.setting != runs[0].setting for run in runs):
        said.append("The runs differ in task or split, so compare them with care.")
    return " ".join(said)


def _sorted_out(others: Sequence[Repeats], best: Repeats) -> Iterator[str]:
    """Many recipes in a sentence for those that differ from the best one and one for those that do not."""
    seen = {each.name: difference.seen for each in others if (difference := each.difference(best))}
    if worse := [name for name, apart in seen.items() if apart]:
        yield f"Worse than it, with 95% confidence each: {', '.join(worse)}."
    if alike := [name for name, apart in seen.items() if not apart]:
        yield f"No difference seen: {', '.join(alike)}."
    if unknown := [each.name for each in others if each.name not in seen]:
        yield f"Not enough common seeds for an interval: {', '.join(unknown)}."


def _mean(each: Repeats) -> float:
    found = each.spread()
    assert found
    return found.mean


def _spread(each: Repeats) -> str:
    found = each.spread()
    assert found
    return f"{found.show(each.primary)} over {plural(found.count, 'seed')}"


def private(run: Run) -> str:
    """What the accountant charged, of a run that is private; nothing of any other run."""
    if run.summary["epsilon"] is None or run.privacy is None:
        return ""
    unit, how = run.privacy
    kind = "which proves nothing, because its noise was fixed" if run.fixed_noise else "proved"
    delta = f" at δ = {how['delta']:g}" if isinstance(how.get("delta"), float) else ""
    relation = f", for neighbours by {by}" if (by := run.summary["relation"]) else ""
    spent = f"ε = {run.summary['epsilon']:.4g}{delta} for each {unit}{relation} ({kind})"
    if (tight := run.summary["epsilon_pld"]) is not None:
        spent += f"; by the tighter PLD accountant it is {tight:.4g}"
    if (colluders := run.summary["colluders"]) is not None:
        spent += f"; it holds if at most {plural(colluders, 'client')} of a sum told the server their noise"
    return f"{run.name}: after {plural(len(run.ledger.rows), 'round')} the accountant had charged {spent}."


def secured(run: Run) -> str:
    """What the server could see and what not, of a run with secure sums; nothing of any other run."""
    rows = run.ledger.rows
    asked = [row for row in rows if row.secure]
    done = [row for row in asked if "quantisation" in row.metrics]
    if not asked:
        return ""
    said = [f"{run.name}: in {len(done)} of {plural(len(rows), 'round')} the server saw a secure sum only."]
    if done:
        fewest = min(each.answered for row in done for each in row.secure if each.stage == "masked")
        lies = any(each.stage == "agreement" for row in done for each in row.secure)
        server = "also if it lies" if lies else "if it keeps to the protocol"
        said += [
            f"It could see the sum of the vectors of {fewest} or more clients, the sum of their record counts,",
            "who took part and at which stage who dropped out.",
            f"It could not see the vector or the record count of any client (proved, {server}).",
        ]
        if any("scale" in row.metrics for row in done):
            said.append("To agree on a scale it was told the largest magnitude in each client's update.")
    if len(asked) > len(done):
        said.append(f"{plural(len(asked) - len(done), 'sum')} stopped early and gave nothing away.")
    if len(rows) > len(asked):
        said.append(f"In {plural(len(rows) - len(asked), 'other round')} it saw each client's message.")
    added = run.summary["protocol_up"], run.summary["protocol_down"]
    said.append(f"The protocol added {size(added[0])} up and {size(added[1])} down.")
    return " ".join(said)


def _stalled(run: Run) -> str:
    best, primary = best_row(run.ledger), run.ledger.primary
    assert best
    value = primary.show(best.metrics[VALIDATION + primary.name])
    return f"the best {primary.words} of the validation records, {value}, was in round {best.round}"


def _unfinished(run: Run) -> str:
    budget = run.privacy[1].get("budget") if run.privacy else None
    if isinstance(budget, float):  # which may be what ended it
        return f"{run.name} has done {run.rounds} rounds within its privacy budget of ε = {budget:g}."
    return f"{run.name} is unfinished: {run.rounds} rounds are done."


def _alone(run: Run) -> list[str]:
    s = run.summary
    said = [
        f"{run.name} reached a test {run.primary.words} of {run.primary.show(run.values[-1])} in "
        f"{plural(s['rounds'], 'round')}.",
        f"A client sent {size(s['bytes_up_per_client_round'])} a round;",
        f"in all, clients sent {size(s['bytes_up'])} and received {size(s['bytes_down'])}.",
    ]
    if s["clients_failed"]:
        said.append(f"{plural(s['clients_failed'], 'answer')} failed.")
    if s["epsilon"] is not None:
        relation = f" for neighbours by {s['relation']}" if s["relation"] else ""
        beside = f" (by PLD {s['epsilon_pld']:.4g})" if s["epsilon_pld"] is not None else ""
        said.append(f"The accountant charged ε = {s['epsilon']:.4g}{beside}{relation}.")
    return said


def _compared(ranked: Sequence[Run]) -> list[str]:
    """The best run, and which of those that end within a point of it got that far with the fewest bytes."""
    best, primary = ranked[0], ranked[0].primary
    level, close = near(primary, best.values[-1])
    cost = {run.name: run.bytes_to(level) for run in ranked if primary.reached(run.values[-1], level)}
    name, least = min(cost.items(), key=lambda item: item[1])
    after = f"{primary.show(best.values[-1])} after {plural(len(best.ledger.rows), 'round')}"
    said = [f"{best.name} has the best test {primary.words}, {after}."]
    if len(cost) == 1:
        said.append(f"No other run ends within {close} of it; its clients sent {size(least)} to come that close.")
    else:
        who = "it also" if name == best.name else name
        said.append(f"Of the {len(cost)} runs that end within {close} of it, {who} got that far with the fewest")
        said.append(f"bytes sent by clients: {size(least)}.")
    if 0 < least < cost[best.name]:
        ratio = cost[best.name] / least
        times = f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}"
        said.append(f"{best.name} needed {size(cost[best.name])}, {times} times as many.")
    return said
