"""Where it runs: plan cells, start and supervise ranks, keep the records, project them to MLflow.
Never imports torch."""

import sys

# As in analysis/__init__.py.
if (
    sys.argv[:1] == ["-m"]
    and not getattr(sys.flags, "safe_path", sys.flags.isolated)
    and f"{sys.path[0]}/launch" not in __path__
):
    sys.path.pop(0)
