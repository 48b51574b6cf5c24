"""Load a topology from a file, standard input, or this machine."""

from analysis.errors import UnreadableInput
from analysis.foreign import LARGEST_TOPOLOGY_BYTES, read_text
from analysis.topology.model import Topology
from analysis.topology.nccl_xml import is_topology_xml, parse_topology_xml
from analysis.topology.smi_text import parse_topology_text


def parse_topology(text: str, gpu_name: str | None = None) -> Topology:
    """Read the text of `nvidia-smi topo -m`, or NCCL's XML; the first character tells them apart.

    `gpu_name` is the product name of every GPU, which the text does not say ("Tesla V100-SXM2-16GB").
    """
    if is_topology_xml(text):
        return parse_topology_xml(text)
    return parse_topology_text(
        text, gpu_names=dict.fromkeys(range(1024), gpu_name) if gpu_name else None
    )


def load_topology(file: str | None, gpu_name: str | None = None) -> Topology:
    """Load the topology in a file (`-`: standard input), or of this machine if `file` is None."""
    if file is None:
        from analysis.topology.nvml import read_live_topology

        return read_live_topology()
    try:
        return parse_topology(read_text(file, LARGEST_TOPOLOGY_BYTES), gpu_name)
    except UnreadableInput as error:
        raise UnreadableInput(f"{file}: {error}") from None
