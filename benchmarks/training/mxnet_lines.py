"""The lines of MXNet's tools/bandwidth/measure.py, for scripts that read them."""

import re
from collections.abc import Mapping, Sequence

from conf.cell import Cell

# Our strategies by measure.py's names of its stores.
MXNET_NAMES = {"nccl_allreduce": "nccl", "cpu_staged": "local"}


def mxnet_lines(cell: Cell, model: Mapping[str, float], error: float, exchange_ms: Sequence[float]) -> list[str]:
    """Return what measure.py prints. GB/s is size · 2(n−1)/n ÷ time; `error` is that of one exchange, of every line."""
    count, name = cell.world_size, cell.strategy["name"]
    numbered = re.fullmatch(r"([a-z]+)(\d+)", cell.model.name)  # resnet, 200; but inception_v3
    kind, layers = numbered.groups() if numbered else (cell.model.name, "0")
    size_mb = model["gradient_bytes"] / 1e6
    shape = f"{cell.model.channels},{cell.model.image_size},{cell.model.image_size}"
    head = (
        f"INFO:root:Namespace(disp_batches=1, gpus='{','.join(map(str, cell.gpus))}', image_shape='{shape}', "
        f"kv_store='{MXNET_NAMES.get(name, name.removeprefix('kvstore_'))}', network='{kind}', "
        f"num_batches={len(exchange_ms)}, num_classes={cell.model.classes}, num_layers={layers}, "
        f"optimizer='None', test_results=1)"
    )
    lines = [head, f"INFO:root:num of arrays = {model['arrays']:.0f}, total size = {size_mb:.6f} MB"]
    for number, ms in enumerate(exchange_ms):
        rate = size_mb * 2 * (count - 1) / count / ms  # MB per ms is GB/s
        lines.append(f"INFO:root:iter {number + 1}, {ms / 1e3:.6f} sec, {rate:.6f} GB/sec per gpu, error {error:.6f}")
    return lines
