"""The lines that MXNet's tools/bandwidth/measure.py prints, as patterns: those of tests/data/mxnet_bandwidth.txt."""

import re

FORMS = (
    re.compile(
        r"INFO:root:Namespace\(disp_batches=1, gpus='(?P<gpus>[\d,]+)', image_shape='(?P<shape>\d+,\d+,\d+)', "
        r"kv_store='(?P<store>[a-z_]+)', network='(?P<network>[\w-]+)', num_batches=(?P<batches>\d+), "
        r"num_classes=(?P<classes>\d+), num_layers=(?P<layers>\d+), optimizer='\w+', test_results=1\)"
    ),
    re.compile(r"INFO:root:num of arrays = (?P<arrays>\d+), total size = (?P<mb>\d+\.\d{6}) MB"),
    re.compile(
        r"INFO:root:iter (?P<number>\d+), (?P<seconds>\d+\.\d{6}) sec, (?P<rate>\d+\.\d{6}) GB/sec per gpu, "
        r"error (?P<error>\d+\.\d{6})"
    ),
)
