"""Plan a sweep and choose its engine. Hosts are asked what they have before the plan, and compared with each other."""

from collections.abc import Mapping, Sequence

from conf.schema import Request
from launch.engines.engine import CellEngine
from launch.engines.hosts import HostsEngine
from launch.engines.local import LocalEngine
from launch.machine.fleet import compare
from launch.plan.nodes import wanted_hosts
from launch.plan.plan import Plan, plan, refuse_wrong_options
from launch.study.provenance import HostsAround, Surroundings


def prepared(
    requests: Sequence[Request], surrounding: Mapping[str, str]
) -> tuple[Plan, CellEngine, Surroundings]:
    """Return the plan of a sweep, the engine that runs it, and what is around its cells. A dry run starts nothing.

    Raises:
        Refused: the request is wrong, or a host cannot do its part. No process of ours is left.
    """
    first = requests[0].config
    limits = first.engine
    if first.dry_run or not any(request.config.nodes for request in requests):
        planned = plan(requests, surrounding)
        local = LocalEngine(planned.machine, surrounding, limits.start, limits.stop_grace_s)
        return planned, local, Surroundings(planned.machine, surrounding)
    refuse_wrong_options(requests)  # before any host is asked
    names = wanted_hosts([request.config for request in requests], surrounding)
    engine = HostsEngine(limits, surrounding)
    try:
        fleet = engine.open_on(names, first.device)
        notices = compare(fleet)
        planned = plan(requests, surrounding, fleet)
        engine.meet([one.cell for one in planned.cells])
    except BaseException:
        engine.close()
        raise
    planned.notices[:0] = notices
    return planned, engine, HostsAround(planned.machine, surrounding, fleet, engine.variables)
