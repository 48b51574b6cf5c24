"""What a campaign of faults reports: its outcomes, gathered from the tests that saw them, and their summary.

A test hands its outcomes over by `record_outcomes(record_property, outcomes)`.
"""

import json
import statistics

PROPERTY = "outcomes"


def record_outcomes(record_property, outcomes):
    """Hand outcomes to the process that prints and writes them; fail if one is not right."""
    record_property(PROPERTY, json.dumps([one.as_json() for one in outcomes]))
    wrong = [
        f"{one.kind} of the {one.target} in {one.phase}: {'; '.join(one.wrong)}"
        for one in outcomes
        if not one.right
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(outcomes)} are not right", *wrong])


def reported(stats):
    """The outcomes that the tests of a session handed over, from pytest's reports."""
    reports = [report for kind in ("passed", "failed") for report in stats.get(kind, ())]
    given = [
        value for report in reports for name, value in report.user_properties if name == PROPERTY
    ]
    return [outcome for value in dict.fromkeys(given) for outcome in json.loads(value)]


def summary(outcomes):
    """Lines with the figures of a campaign."""
    ended = [one for one in outcomes if one["noticed_s"] is not None and one["cause"] != "hang"]
    hung = [one for one in outcomes if one["noticed_s"] is not None and one["cause"] == "hang"]
    lines = [
        f"campaign: {len(outcomes)} faults, {share(outcomes, 'right')} right; "
        f"cause right {share(outcomes, lambda one: one['cause'] == one['expected_cause'])}, "
        f"rank right {share(outcomes, lambda one: one['rank'] == one['expected_rank'])}, "
        f"others finished {share(outcomes, 'others_finished')}",
        f"  lost samples {total(outcomes, 'samples_lost')}, orphans {total(outcomes, 'orphans')}, "
        f"left files {sum(len(one['left_files']) for one in outcomes)}, tracebacks {total(outcomes, 'traceback')}",
    ]
    for name, some in (("ended processes", ended), ("hangs", hung)):
        if some:
            times = [one["noticed_s"] for one in some]
            late = sum(one["noticed_s"] > one["goal_s"] for one in some)
            lines.append(
                f"  {name} noticed after {statistics.median(times):.1f} s (median), {max(times):.1f} s (worst); "
                f"{late} of {len(some)} later than their goal"
            )
    return "\n".join(lines)


def share(outcomes, test):
    """How many outcomes pass a test, as `12 of 12 (100 %)`; a text tests the field of that name."""
    count = sum(bool(one[test] if isinstance(test, str) else test(one)) for one in outcomes)
    return f"{count} of {len(outcomes)} ({100 * count / len(outcomes):.0f} %)"


def total(outcomes, name):
    return sum(one[name] for one in outcomes)
