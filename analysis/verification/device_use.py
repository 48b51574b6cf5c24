"""How much of the devices a training used: operations against their peak, and images a joule."""

from benchmarks.record import Record
from conf import groups

# Dense peaks in 10¹² operations a second, {GPU: (half precision, TF32, float32)}: NVIDIA's data
# sheets of H200 (2024), H100 (2023) and A100 (2021); those of H200 and H100 name sparse ones, twice
# as high.
PEAK_TFLOPS = {
    "NVIDIA H200": (989.4, 494.7, 66.9),
    "NVIDIA H100 80GB HBM3": (989.4, 494.7, 66.9),
    "NVIDIA H100 PCIe": (756.0, 378.0, 51.2),
    "NVIDIA A100-SXM4-40GB": (312.0, 156.0, 19.5),
    "NVIDIA A100-SXM4-80GB": (312.0, 156.0, 19.5),
}
COLUMN = {"tf32": 1, "fp32": 2}  # else half precision


def device_use(record: Record, power_w: float | None) -> dict[str, float]:
    """Return metrics of a training cell; absent where model, GPU or power is not known.

    `power_w` is that of all its GPUs.
    """
    cell, used = record.cell, {}
    rate = record.metrics.get("throughput/images_per_second")
    if rate is None:
        return {}
    if power_w:
        used["energy/images_per_joule"] = rate / power_w
    gigaflop = groups.training_gigaflop(cell.model.name, cell.model.image_size)
    if gigaflop is not None:
        used["compute/tflops"] = gigaflop * rate / cell.world_size / 1e3
        peaks = PEAK_TFLOPS.get(str(record.ranks[0].get("name")) if record.ranks else "")
        if peaks is not None:
            used["compute/mfu"] = used["compute/tflops"] / peaks[COLUMN.get(cell.precision, 0)]
    return used
