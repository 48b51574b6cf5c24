"""The grammar of gpus= and of nodes=: what is typed, what Hydra composes, what is refused."""

import dataclasses

import pytest
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as some
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import subsets
from conf.command_line import normalise
from conf.options import Refused
from conf.subsets import GPUS, NODES, expand

pytestmark = pytest.mark.usefixtures("hydra")
GRAMMARS = {"gpus": GPUS, "nodes": NODES}
UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-41b3359c-e721-56e5-8009-12e5797ed514"
# The field of the schema alone: merging all of it takes most of the time.
FIELD = OmegaConf.structured(
    dataclasses.make_dataclass(
        "Field", [("sets", list[str], dataclasses.field(default_factory=list))]
    )
)


def sweep_of(arguments):
    """What Hydra's sweeper makes of the arguments: one list of overrides for each cell."""
    (override,) = OverridesParser.create().parse_overrides(arguments)
    if override.is_sweep_override():
        name = arguments[0].partition("=")[0]
        return [[f"{name}={text}"] for text in override.sweep_string_iterator()]
    return [arguments]


def composed(*arguments):
    """The subsets that reach the schema, through Hydra's parser and its composition."""
    cells = sweep_of(normalise(arguments))
    return [list(compose("config", overrides=cell).gpus) for cell in cells]


def read(name, text):
    """The same of one field, without the defaults list: the parser and the schema's typed field."""
    sets = []
    for cell in sweep_of([f"{name}={GRAMMARS[name].canonical(text)}"]):
        (override,) = OverridesParser.create().parse_overrides(cell)
        sets.append(list(OmegaConf.merge(FIELD, {"sets": override.value()}).sets))
    return sets


OF_GPUS = [
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
]  # fmt: skip
OF_NODES = [
    ("2", "2"), ("1,2", "1 2"), ("[2]", "2"), ("a", "a"), ("a,b", "a+b"), ("b,a", "b+a"),
    ("a+b,a+c", "a+b a+c"), ("a,a+b", "a a+b"), ("a,b,a+b", "a b a+b"),
    ("[a,b],[c]", "a+b c"), ("'a,b'", "a+b"), ("a\\,b", "a+b"), ("choice(a,b)", "a b"),
    ("1,a+b", "1 a+b"), ("all", "all"), ("each,pairs,scale", "each pairs scale"),
    ("dgx-01.rack_2.example.org,10.0.0.7", "dgx-01.rack_2.example.org+10.0.0.7"),
    ("1_3,1e5", "1_3+1e5"),  # Hydra would read two numbers
    ("null,true", "null+true"), ("n" * 253, "n" * 253),
]  # fmt: skip
TYPED = [("gpus", *row) for row in OF_GPUS]
for text, sets in OF_NODES:
    TYPED.append(("nodes", text, [names.split("+") for names in sets.split()]))


@pytest.mark.parametrize(("name", "typed", "sets"), TYPED)
def test_what_is_typed_is_what_the_schema_gets(name, typed, sets):
    assert read(name, typed) == sets
    canonical = GRAMMARS[name].canonical
    assert canonical(canonical(typed)) == canonical(typed)


REFUSED_GPUS = [
    ("0,0", "GPU 0 is named twice"), ("0+3+0", "GPU 0 is named twice"),
    ("[0,1],[3,3]", "GPU 3 is named twice"), ("1_3", "'1_3' is not a GPU id"),
    ("range(0,3)", "range(…) is not accepted"),
    ("interval(0,3)", "interval(…) is not accepted"), ("glob(*)", "glob(…) is not accepted"),
    ("shuffle(0,3)", "shuffle(…) is not accepted"), ("sort(0,3)", "sort(…) is not accepted"),
    ("", "names no GPU"), ("[]", "empty or unclosed part"), ("''", "empty or unclosed part"),
    ("choice()", "names no GPU"), ("0,", "empty or unclosed part"),
    (",0", "empty or unclosed part"), ("0,,3", "empty or unclosed part"),
    ("0+", "empty or unclosed part"), ("[0,1", "empty or unclosed part"),
    ("0]", "empty or unclosed part"), ("'0,1", "empty or unclosed part"),
    ("[[0,1]]", "empty or unclosed part"), ("[0'],['3]", "empty or unclosed part"),
    ("0,1;0,3", "'1;0' is not a GPU id"), ("0-3", "a range; write gpus=0,1,2,3"),
    ("0:3", "a range; write gpus=0,1,2,3"), ("0/3", "'0/3' is not a GPU id"), ("03", "'03' is not a GPU id"),
    ("-1", "'-1' is not a GPU id"), ("+1", "empty or unclosed part"),
    ("1e1", "'1e1' is not a GPU id"), ("1.0", "'1.0' is not a GPU id"),
    ("0x1", "'0x1' is not a GPU id"), ("99999", "'99999' is not a GPU id"),
    ("true", "'true' is not a GPU id"), ("null", "'null' is not a GPU id"),
    ("All", "'All' is not a GPU id"), ("best", "'best' is not a GPU id"),
    ("best:0", "'best:0' is not a GPU id"), ("worst_order", "'worst_order' is not a GPU id"),
    ("best_order:4", "'best_order:4' is not a GPU id"), ("classes:", "'classes:' is not a GPU id"),
    ("GPU-", "'GPU-' is not a GPU id"), ("0+all", "the word all stands alone"),
    ("[0,all]", "the word all stands alone"), ("all+each", "the word all stands alone"),
    ("0,all", "more than one way"),
    ("1,3,1+2", "more than one way (a GPU alone beside other subsets is [1])"),
    ("٣", "'٣' is not a GPU id"), ("1٣", "'1٣' is not a GPU id"), ("best:1٣", "is not a GPU id"),
    ("²", "'²' is not a GPU id"), ("0, 3", "has a space"), ("0 3", "has a space"),
    (" 0", "has a space"), ("0\n", "line break"), ("\u00a0", "names no GPU"),
    ("${oc.env:HOME}", "is not a GPU id"), ("0\0", "is not a GPU id"),
]  # fmt: skip
REFUSED_NODES = [
    ("", "names no host"), ("[]", "empty or unclosed part"), ("a,", "empty or unclosed part"),
    ("a b", "has a space"), ("0", "'0' is not a name of a host, number or word"),
    ("007", "'007' is not a name"), ("12345", "'12345' is not a name"),
    ("-oProxyCommand=x", "is not a name"), ("-a", "'-a' is not a name"), (".", "'.' is not a name"),
    ("a:22", "'a:22' is not a name"), ("root@a", "'root@a' is not a name"),
    ("a/b", "'a/b' is not a name"), ("ä", "'ä' is not a name"),
    ("node\N{ARABIC-INDIC DIGIT TWO}", "is not a name"), ("n" * 254, "is not a name"),
    ("a,a", "host a is named twice"), ("a+b+a", "host a is named twice"),
    ("2+a", "the number 2 stands alone"), ("a+all", "the word all stands alone"),
    ("a,2", "more than one way"), ("a,all", "more than one way"),
    ("range(1,3)", "range(…) is not accepted"), ("best:2", "is not a name"),
]  # fmt: skip
FORMS = {"gpus": ("gpus=0,3", "gpus=0+1,0+3", "best:2"), "nodes": ("nodes=a+b,a+c",)}
REFUSED = [("gpus", *row) for row in REFUSED_GPUS] + [("nodes", *row) for row in REFUSED_NODES]


@pytest.mark.parametrize(("name", "typed", "says"), REFUSED)
def test_what_names_nothing_is_refused_with_the_right_form(name, typed, says):
    with pytest.raises(Refused) as refused:
        normalise([f"{name}={typed}"])
    message = str(refused.value)
    assert message.startswith(f"{name}={typed}: ") and says in message
    assert "twice" in says or "range" in says or all(form in message for form in FORMS[name])


def test_what_is_typed_passes_hydras_composition():
    assert composed("gpus=0+1,[3],'4,5'") == [["0", "1"], ["3"], ["4", "5"]]
    assert composed("gpus=pairs,scale") == [["pairs"], ["scale"]]


def test_only_gpus_is_rewritten():
    others = [
        "model=resnet50,vgg16", "study=gpus", "nccl.socket_nthreads=1,2", "-m",
        "+gpus_per_node=0,3",
    ]  # fmt: skip
    assert GPUS.normalise([*others, "gpus=0,3"]) == [*others, "gpus=[0,3]"]


@pytest.mark.parametrize("text", ["++gpus=0,3", "+gpus=3", "gpus@x=0,3"])
def test_another_way_around_the_rewriting_is_left_to_the_schema(text):
    assert GPUS.normalise([text]) == [text]


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
NAMES = some.from_regex(r"[a-z_][a-z0-9._-]{0,8}", fullmatch=True).filter(subsets.is_name)


def several(members):
    sets = some.lists(members, min_size=1, max_size=5, unique=True)
    return some.lists(sets, min_size=1, max_size=5)


def joined(inner, form, between=","):
    return lambda sets: between.join(form.format(inner.join(members)) for members in sets)


RENDERINGS = [
    *(joined(inner, form) for inner in ",+" for form in ("[{}]", "'{}'", '"{}"')),
    lambda sets: "choice(" + ",".join("+".join(members) for members in sets) + ")",
    lambda sets: ",".join(
        "\\,".join(members) if len(members) > 1 else f"[{members[0]}]" for members in sets
    ),
]
DRAWN = some.tuples(some.just("gpus"), several(DEVICES)) | some.tuples(
    some.just("nodes"), several(NAMES)
)


@settings(derandomize=True, max_examples=120)
@given(DRAWN, some.sampled_from(RENDERINGS))
def test_every_rendering_of_sets_composes_to_exactly_them(drawn, render):
    name, sets = drawn
    assert read(name, render(sets)) == sets


PIECES = ["0", "3", "13", "03", "all", "best:2", "classes", "choice(", ")", "range(", "[", "]", "'", '"', ",", "+", "\\,",
          " ", ";", ":", "-", "_", ".", "GPU-8932f937", "1b:00.0", "٣", "\0", "\n", "$", "{", "}", "=", "null",
          "1e1"]  # fmt: skip
OF_HOSTS = [
    *"a2)[]'\",+ :-_.\0\n${}=@",
    *["b1", "03", "all", "classes", "choice(", "\\,", "null", "1e1"],
]
PIECES += OF_HOSTS


@settings(derandomize=True, max_examples=600)
@given(
    some.sampled_from(sorted(GRAMMARS)),
    some.lists(some.sampled_from(PIECES), max_size=9).map("".join) | some.text(max_size=30),
)
def test_any_other_text_is_refused_or_means_what_it_says(name, text):
    try:
        form = GRAMMARS[name].canonical(text)
    except Refused as refused:
        assert str(refused).startswith(f"{name}=")
        return
    sets, place = read(name, text), 0
    assert GRAMMARS[name].canonical(form) == form
    # Every member is a piece of the text, in the order of the text.
    for members in sets:
        assert len(set(members)) == len(members) > 0
        for member in members:
            place = text.index(member, place) + len(member)


NONSENSE = ["[" * 10_000, "0," * 5_000, "0+" * 5_000 + "0", "'" * 10_001]
NONSENSE += ["a" * 10_000, "[0]" * 3_000]


@pytest.mark.parametrize("text", NONSENSE)
def test_long_nonsense_is_refused_at_once(text):
    for grammar in GRAMMARS.values():
        with pytest.raises(Refused):
            grammar.canonical(text)


def test_words_name_ordered_subsets():
    assert expand("all", [0, 1, 3]) == [(0, 1, 3)]
    assert expand("each", [0, 1, 3]) == [(0,), (1,), (3,)]
    assert expand("pairs", [0, 1, 3]) == [(0, 1), (0, 3), (1, 3)]
    assert expand("scale", range(8)) == [(0,), (0, 1), (0, 1, 2, 3), tuple(range(8))]
    assert expand("scale", range(6)) == [(0,), (0, 1), (0, 1, 2, 3), tuple(range(6))]
    assert expand("scale", [5]) == [(5,)]
    assert len(expand("pairs", range(8))) == 28
    with pytest.raises(Refused, match="gpus=some: expected"):
        expand("some", [0])


def test_every_word_of_the_sentence_is_accepted():
    listed = subsets.GPU_FORMS.split("a word: ")[1].split(", ")
    assert [read("gpus", word) for word in listed] == [[[word]] for word in listed]
