"""The grammar of gpus=: what is typed, what Hydra composes from it, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as some
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import subsets
from conf.options import Refused
from conf.subsets import GPUS, expand

ROOT = Path(__file__).parent.parent
canonical, normalise = GPUS.canonical, GPUS.normalise
UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-41b3359c-e721-56e5-8009-12e5797ed514"


pytestmark = pytest.mark.usefixtures("hydra")


def split(arguments):
    """What Hydra's sweeper makes of the arguments: one list of overrides for each cell."""
    (override,) = OverridesParser.create().parse_overrides(arguments)
    if override.is_sweep_override():
        return [[f"gpus={text}"] for text in override.sweep_string_iterator()]
    return [arguments]


def composed(*arguments):
    """The subsets that reach the schema, through Hydra's parser and its composition."""
    return [list(compose("config", overrides=cell).gpus) for cell in split(normalise(arguments))]


# The field of the schema alone: merging all of it takes most of the time.
FIELD = OmegaConf.structured(
    dataclasses.make_dataclass(
        "Field", [("gpus", list[str], dataclasses.field(default_factory=list))]
    )
)


def read(text):
    """The same without the defaults list, which takes most of the time: the parser and the typed field of the schema."""
    cells = [cell for (cell,) in split([f"gpus={canonical(text)}"])]
    found = []
    for cell in cells:
        (override,) = OverridesParser.create().parse_overrides([cell])
        found.append(list(OmegaConf.merge(FIELD, {"gpus": override.value()}).gpus))
    return found


@pytest.mark.parametrize(
    ("typed", "subsets"),
    [
        ("0", [["0"]]), ("0,3", [["0", "3"]]), ("3,0", [["3", "0"]]),
        ("7,1,4,2", [["7", "1", "4", "2"]]), ("'0,3'", [["0", "3"]]), ('"0,3"', [["0", "3"]]),
        ("0\\,3", [["0", "3"]]), ("0\\,1,0\\,3", [["0", "1"], ["0", "3"]]), ("0+3", [["0", "3"]]),
        ("[0,3]", [["0", "3"]]), ("['0','3']", [["0", "3"]]),
        ("0+1,0+3", [["0", "1"], ["0", "3"]]), ("3+0,1+0", [["3", "0"], ["1", "0"]]),
        ("[0,1],[0,3]", [["0", "1"], ["0", "3"]]), ("'0,1','0,3'", [["0", "1"], ["0", "3"]]),
        ("[0,1],3", [["0", "1"], ["3"]]), ("0+1,[2],'3,4'", [["0", "1"], ["2"], ["3", "4"]]),
        ("choice(0,3)", [["0"], ["3"]]), ("choice([0,1],[0,3])", [["0", "1"], ["0", "3"]]),
        ("choice(0+1,3)", [["0", "1"], ["3"]]), ("all", [["all"]]), ("each", [["each"]]),
        ("pairs", [["pairs"]]), ("scale", [["scale"]]), ("[scale]", [["scale"]]),
        ("pairs,scale", [["pairs"], ["scale"]]), ("0+3,all", [["0", "3"], ["all"]]),
        ("best:2", [["best:2"]]), ("worst:2", [["worst:2"]]),
        ("worst_order:4", [["worst_order:4"]]), ("best:2,worst:2", [["best:2"], ["worst:2"]]),
        ("classes", [["classes"]]), ("classes:2", [["classes:2"]]), (UUID, [[UUID]]),
        (f"{UUID},3", [[UUID, "3"]]), (f"{MIG}+{UUID}", [[MIG, UUID]]),
        ("0000:1b:00.0,0000:43:00.0", [["0000:1b:00.0", "0000:43:00.0"]]),
        ("00000000:1B:00.0", [["00000000:1B:00.0"]]),
        ("1b:00.0+3,1b:00.0+4", [["1b:00.0", "3"], ["1b:00.0", "4"]]),
    ],
)  # fmt: skip
def test_what_is_typed_is_what_the_schema_gets(typed, subsets):
    assert read(typed) == subsets
    assert canonical(canonical(typed)) == canonical(typed)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("0,0", "GPU 0 is named twice"), ("0+3+0", "GPU 0 is named twice"),
        ("[0,1],[3,3]", "GPU 3 is named twice"), ("1_3", "'1_3' is no GPU id"),
        ("range(0,3)", "range(…) is not accepted"),
        ("interval(0,3)", "interval(…) is not accepted"), ("glob(*)", "glob(…) is not accepted"),
        ("shuffle(0,3)", "shuffle(…) is not accepted"), ("sort(0,3)", "sort(…) is not accepted"),
        ("", "names no GPU"), ("[]", "empty or unclosed part"), ("''", "empty or unclosed part"),
        ("choice()", "names no GPU"), ("0,", "empty or unclosed part"),
        (",0", "empty or unclosed part"), ("0,,3", "empty or unclosed part"),
        ("0+", "empty or unclosed part"), ("[0,1", "empty or unclosed part"),
        ("0]", "empty or unclosed part"), ("'0,1", "empty or unclosed part"),
        ("[[0,1]]", "empty or unclosed part"), ("[0'],['3]", "empty or unclosed part"),
        ("0,1;0,3", "'1;0' is no GPU id"), ("0-3", "'0-3' is no GPU id"),
        ("0:3", "'0:3' is no GPU id"), ("0/3", "'0/3' is no GPU id"), ("03", "'03' is no GPU id"),
        ("-1", "'-1' is no GPU id"), ("+1", "empty or unclosed part"),
        ("1e1", "'1e1' is no GPU id"), ("1.0", "'1.0' is no GPU id"),
        ("0x1", "'0x1' is no GPU id"), ("99999", "'99999' is no GPU id"),
        ("true", "'true' is no GPU id"), ("null", "'null' is no GPU id"),
        ("All", "'All' is no GPU id"), ("best", "'best' is no GPU id"),
        ("best:0", "'best:0' is no GPU id"), ("worst_order", "'worst_order' is no GPU id"),
        ("best_order:4", "'best_order:4' is no GPU id"), ("classes:", "'classes:' is no GPU id"),
        ("GPU-", "'GPU-' is no GPU id"), ("0+all", "the word all stands alone"),
        ("[0,all]", "the word all stands alone"), ("all+each", "the word all stands alone"),
        ("0,all", "more than one way"),
        ("1,3,1+2", "more than one way (a GPU alone beside other subsets is [1])"),
        ("٣", "'٣' is no GPU id"), ("1٣", "'1٣' is no GPU id"), ("best:1٣", "is no GPU id"),
        ("²", "'²' is no GPU id"), ("0, 3", "has a space"), ("0 3", "has a space"),
        (" 0", "has a space"), ("0\n", "line break"), ("\u00a0", "names no GPU"),
        ("${oc.env:HOME}", "is no GPU id"), ("0\0", "is no GPU id"),
    ],
)  # fmt: skip
def test_what_is_no_subset_is_refused_with_the_right_form(typed, says):
    with pytest.raises(Refused) as refused:
        normalise([f"gpus={typed}"])
    message = str(refused.value)
    assert message.startswith(f"gpus={typed}: ")
    assert says in message
    if "twice" not in says:
        assert "gpus=0,3" in message and "gpus=0+1,0+3" in message and "best:2" in message


def test_what_is_typed_passes_hydras_composition():
    assert composed("gpus=0+1,[3],'4,5'") == [["0", "1"], ["3"], ["4", "5"]]
    assert composed("gpus=pairs,scale") == [["pairs"], ["scale"]]


def test_only_gpus_is_rewritten():
    others = [
        "model=resnet50,vgg16", "study=gpus", "nccl.socket_nthreads=1,2", "-m",
        "+gpus_per_node=0,3",
    ]  # fmt: skip
    assert normalise([*others, "gpus=0,3"]) == [*others, "gpus=[0,3]"]


@pytest.mark.parametrize("text", ["++gpus=0,3", "+gpus=3", "gpus@x=0,3"])
def test_another_way_around_the_rewriting_is_left_to_the_schema(text):
    assert normalise([text]) == [text]


@pytest.mark.parametrize(
    "text", ["gpus=3", "++gpus=3", "gpus=all", "gpus='0,3'", "gpus=0+3", "gpus=1_3", "gpus=true"]
)
def test_a_value_that_bypasses_the_rewriting_is_no_list(text):
    with pytest.raises((HydraException, OmegaConfBaseException)) as raised:
        compose("config", overrides=[text])
    assert "not a list" in str(raised.value.__cause__).lower()


@pytest.mark.parametrize("text", ["gpus=0,3", "gpus=[0],[3]", "gpus=choice(0,3)"])
def test_a_sweep_that_bypasses_the_rewriting_is_no_single_cell(text):
    with pytest.raises(HydraException):
        compose("config", overrides=[text])


DEVICES = (
    some.integers(0, 9999).map(str)
    | some.from_regex(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}", fullmatch=True)
    | some.from_regex(r"0000:[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]", fullmatch=True)
)
SUBSETS = some.lists(
    some.lists(DEVICES, min_size=1, max_size=8, unique=True), min_size=1, max_size=6
)
RENDERINGS = (
    lambda subsets: ",".join("[" + ",".join(subset) + "]" for subset in subsets),
    lambda subsets: ",".join("'" + ",".join(subset) + "'" for subset in subsets),
    lambda subsets: ",".join('"' + "+".join(subset) + '"' for subset in subsets),
    lambda subsets: "choice(" + ",".join("+".join(subset) for subset in subsets) + ")",
    lambda subsets: ",".join(
        "\\,".join(subset) if len(subset) > 1 else f"[{subset[0]}]" for subset in subsets
    ),
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(SUBSETS, some.sampled_from(RENDERINGS))
def test_every_rendering_of_subsets_composes_to_exactly_them(subsets, render):
    assert read(render(subsets)) == subsets


PIECES = ["0", "3", "13", "03", "all", "best:2", "classes", "choice(", ")", "range(", "[", "]", "'", '"', ",", "+", "\\,",
          " ", ";", ":", "-", "_", ".", "GPU-8932f937", "1b:00.0", "٣", "\0", "\n", "$", "{", "}", "=", "null",
          "1e1"]  # fmt: skip


@settings(derandomize=True, max_examples=400, deadline=None)
@given(some.lists(some.sampled_from(PIECES), max_size=9).map("".join) | some.text(max_size=30))
def test_any_other_text_is_refused_or_means_what_it_says(text):
    try:
        form = canonical(text)
    except Refused as refused:
        assert str(refused).startswith("gpus=")
        return
    subsets = read(text)
    assert canonical(form) == form
    assert all(len(set(subset)) == len(subset) > 0 for subset in subsets)
    # Every device is a piece of the text, in the order of the text.
    place = 0
    for device in (device for subset in subsets for device in subset):
        place = text.index(device, place) + len(device)


@pytest.mark.parametrize(
    "text",
    ["[" * 10_000, "0," * 5_000, "0+" * 5_000 + "0", "'" * 10_001, "a" * 10_000, "[0]" * 3_000],
)
def test_long_nonsense_is_refused_at_once(text):
    with pytest.raises(Refused):
        canonical(text)


def test_words_name_ordered_subsets():
    assert expand("all", [0, 1, 3]) == [(0, 1, 3)]
    assert expand("each", [0, 1, 3]) == [(0,), (1,), (3,)]
    assert expand("pairs", [0, 1, 3]) == [(0, 1), (0, 3), (1, 3)]
    assert expand("scale", range(8)) == [(0,), (0, 1), (0, 1, 2, 3), tuple(range(8))]
    assert expand("scale", range(6)) == [(0,), (0, 1), (0, 1, 2, 3), tuple(range(6))]
    assert expand("scale", [5]) == [(5,)]
    assert len(expand("pairs", range(8))) == 28
    with pytest.raises(Refused, match="gpus=some: accepted are"):
        expand("some", [0])


def test_every_word_of_the_sentence_is_accepted():
    listed = subsets.GPU_FORMS.split("a word: ")[1].split(", ")
    assert [read(word) for word in listed] == [[[word]] for word in listed]
