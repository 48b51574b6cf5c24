"""The table of NCCL settings: what each field becomes and accepts, what never reaches a rank."""

import dataclasses

import pytest
from build import configuration
from hypothesis import given, settings
from hypothesis import strategies as some

from conf.nccl import (
    ALGORITHMS,
    FIELDS,
    FUNCTIONS,
    OTHERS,
    PROTOCOLS,
    Nccl,
    in_table,
    refuse_multicast,
)
from conf.nccl import settings as nccl_settings
from conf.options import Refused

pytestmark = pytest.mark.usefixtures("hydra")


def composed(*arguments):
    """The variables that a command line asks for, and the notices."""
    return nccl_settings(configuration(*arguments).nccl)


def asked(**fields):
    return nccl_settings(Nccl(**fields))[0]


def a_value(field):
    """A value that the field's own metadata accepts."""
    free = {"algo": "Ring", "proto": "LL128", "ib_hca": "=mlx5_0:1", "socket_ifname": "^docker"}
    return next(iter(field.metadata["words"]), None) or field.metadata["most"] or free[field.name]


def test_all_fields_at_once_through_hydra():
    values = {name: a_value(field) for name, field in FIELDS.items()}
    variables, notices = composed(*(f"nccl.{name}={value}" for name, value in values.items()))
    assert variables == {f"NCCL_{name.upper()}": str(value) for name, value in values.items()}
    assert notices == []
    assert all(field.metadata["help"] for field in FIELDS.values())


def test_nothing_asked_is_nothing_set():
    assert composed() == composed("nccl.p2p_level=null", "nccl.p2p_disable=null") == ({}, [])
    assert all(getattr(Nccl(), field.name) in (None, {}) for field in dataclasses.fields(Nccl))


def test_words_are_case_sensitive_and_numbers_bounded_as_nccl_has_them():
    for name, field in FIELDS.items():
        variable = f"NCCL_{name.upper()}"
        least, most = field.metadata["least"], field.metadata["most"]
        for word in field.metadata["words"]:
            assert asked(**{name: word}) == {variable: word}
            if word.swapcase() != word:
                with pytest.raises(Refused, match=f"case matters: write {word}"):
                    asked(**{name: word.swapcase()})
        if field.metadata["words"]:
            with pytest.raises(Refused, match=f"nccl.{name}=FOO: expected "):
                asked(**{name: "FOO"})
        if least is not None:
            assert asked(**{name: least}) == {variable: str(least)}
            accepted = rf"expected (0 or 1|an integer from {least:,} to {most:,})"
            for value in (least - 1, most + 1, least + 0.5, True, "x"):
                with pytest.raises(Refused, match=rf"nccl.{name}=[^:]*: {accepted}"):
                    asked(**{name: value})
            with pytest.raises(Refused, match=rf"nccl.{name}=nan: not finite; {accepted}"):
                asked(**{name: float("nan")})


@pytest.mark.parametrize("field", ["p2p_level", "net_gdr_level"])
def test_legacy_integers_are_translated_with_a_notice_and_others_refused(field):
    for number, word in enumerate(("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")):
        variables, notices = nccl_settings(Nccl(**{field: str(number)}))
        assert variables == {f"NCCL_{field.upper()}": word}
        said = f"nccl.{field}={number} is NCCL's legacy number for {word}; {word} is used"
        assert notices == [said]
    for value in ("-1", "6", "00", "LOC ", "loc", "NV18"):
        with pytest.raises(Refused, match="expected LOC, NVL, PIX, PXB, PHB or SYS"):
            asked(**{field: value})


WHOLE = "Tree;allgather:ring;reducescatter:ring;broadcast:ring;reduce:ring"
RIGHT = {
    "algo": "Ring ring Ring,Tree ^Tree ^NVLS,NVLSTree allreduce:tree allreduce:^ring "
    "Ring;allreduce:tree allreduce:tree;allgather:ring allgather:PAT reducescatter:nvls " + WHOLE,
    "proto": "Simple ll LL,LL128 ^LL128 allreduce:ll128 Simple;allreduce:ll",
}
NO_COLLECTIVE = f"is not a collective; expected {', '.join(FUNCTIONS).lower()}"
UNKNOWN = ("Foo", "Ring,Foo", "LL,Foo", "", ",", "^", "Ring;", "allreduce:", "Ring Tree", " LL")


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in RIGHT.items() for text in texts.split()]
)
def test_selections_that_every_collective_can_use_are_kept(name, text):
    assert asked(**{name: text}) == {f"NCCL_{name.upper()}": text}
    if text in (WHOLE, "^NVLS,NVLSTree"):
        assert composed(f"nccl.algo='{text}'") == ({"NCCL_ALGO": text}, [])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        *(("algo", text, f"nccl.algo={text}: leaves ") for text in ("Tree", "NVLS", "^Ring")),
        ("algo", "tree", "nccl.algo=allreduce:tree"),  # the form for one collective
        ("algo", "Tree,NVLS", "nccl.algo=allreduce:tree,nvls"),
        ("algo", "CollNetDirect", "nccl.algo=allreduce:collnetdirect"),
        ("algo", "PAT", "nccl.algo=allreduce:pat"),
        ("algo", "^ring,tree", "nccl.algo=allreduce:^ring,tree"),
        ("algo", "allgather:tree", "leaves allgather without an algorithm ("),
        ("algo", "Ring;broadcast:tree", "leaves broadcast without an algorithm ("),
        ("algo", "reduce:NVLS", "leaves reduce without an algorithm ("),
        ("algo", "allreduce:PAT", "leaves allreduce without an algorithm ("),
        ("proto", "^LL,LL128,Simple", "without a protocol"),
        *((name, text, f"nccl.{name}=") for name in ("algo", "proto") for text in UNKNOWN),
        *((name, "alltoall:ring", NO_COLLECTIVE) for name in ("algo", "proto")),
    ],
)
def test_selections_that_leave_a_collective_nothing_or_name_what_is_not_there(name, text, says):
    with pytest.raises(Refused) as refused:
        asked(**{name: text})
    assert says in str(refused.value)


WORDS = some.lists(some.sampled_from([*ALGORITHMS, *PROTOCOLS, "foo", ""]), min_size=1, max_size=3)
PARTS = some.tuples(
    some.sampled_from(["", "allreduce:", "allgather:", "broadcast:", "x:"]),
    some.sampled_from(["", "^"]),
    WORDS.map(",".join),
).map("".join)
SELECTIONS = some.lists(PARTS, min_size=1, max_size=3).map(";".join)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(SELECTIONS | some.text(max_size=20))
def test_any_selection_is_kept_as_it_is_or_refused(text):
    for name in ("algo", "proto"):
        try:
            assert asked(**{name: text}) == {f"NCCL_{name.upper()}": text}
        except Refused as refused:
            assert str(refused).startswith(f"nccl.{name}=")


@pytest.mark.parametrize("name", ["algo", "ib_hca", "socket_ifname"])
@pytest.mark.parametrize("text", ["", "a\nb", "a\0b", "é", "\x1b[31m", "a" * 501])
def test_free_text_is_printable_ascii(name, text):
    with pytest.raises(Refused, match=f"nccl.{name}="):
        asked(**{name: text})


def test_the_sharp_preset_sets_the_variables_of_the_plugin_s_page():
    expected = {"NCCL_COLLNET_ENABLE": "1", "NCCL_PLUGIN_P2P": "ib", "NCCL_SHARP_MAX_COMMS": "1"}
    expected |= {"NCCL_IB_PCI_RELAXED_ORDERING": "0", "SHARP_COLL_ENABLE_SAT": "1"}
    assert composed("nccl=sharp")[0] == expected
    typed = ("nccl.sharp_max_comms=2", "nccl.other.SHARP_COLL_ENABLE_SAT=0")
    changes = {"NCCL_SHARP_MAX_COMMS": "2", "SHARP_COLL_ENABLE_SAT": "0"}
    assert composed("nccl=sharp", *typed)[0] == expected | changes


def test_every_other_variable_of_nccl_s_gets_in_and_its_effect_is_not_checked():
    for name in OTHERS:
        assert asked(other={name: "1"}) == {name: "1"}
    assert not any(map(in_table, OTHERS))
    said = "nccl.other.NCCL_WIN_ENABLE=1: its effect is not checked"
    for typed in ("other.win_enable", "env.NCCL_WIN_ENABLE"):
        assert composed(f"nccl.{typed}=1") == ({"NCCL_WIN_ENABLE": "1"}, [said])
    assert composed("nccl.other.cta_policy=null") == ({}, [])
    variables, (notice,) = composed("nccl.other.NCCL_OF_A_LATER_RELEASE=7")
    assert variables == {"NCCL_OF_A_LATER_RELEASE": "7"}
    said = "NCCL up to 2.30 has no such variable, and NCCL ignores what it does not know"
    assert notice.endswith(said)


FORBIDDEN = {
    "a library": "NET_PLUGIN TUNER_PLUGIN ENV_PLUGIN GIN_PLUGIN NEW_PLUGIN IBVERBS_LIB",
    "files": "TOPO_FILE TOPO_DUMP_FILE GRAPH_DUMP_FILE CONF_FILE NEW_FILE",
    "meet elsewhere": "COMM_ID HOSTID MNNVL_UUID NEW_ADDR",
    "Ringside itself": "DEBUG DEBUG_SUBSYS RAS_ENABLE",
    "multicast": "NVLS_NEW MULTICAST_ENABLE SYM_MULTIMEM",
}
FOREIGN = ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "PATH", "TORCH_LOGS", "CUDA_X", "", "A=B")


NEVER = [(f"NCCL_{name}", what) for what, names in FORBIDDEN.items() for name in names.split()]
NEVER += [(name, "NCCL's variables") for name in FOREIGN]


@pytest.mark.parametrize(("name", "what"), NEVER)
def test_variables_that_load_write_redirect_or_multicast_never_pass(name, what):
    with pytest.raises(Refused) as refused:
        asked(other={name: "x"})
    assert str(refused.value).startswith(f"nccl.other.{name}=x: ") and what in str(refused.value)
    assert name.removeprefix("NCCL_").lower() not in FIELDS


@pytest.mark.parametrize("value", ["", "a\nb", "a\0b", "é", "x" * 201, True, ["a\nb"]])
def test_values_of_other_variables_are_printable_ascii(value):
    with pytest.raises(Refused, match=r"nccl\.other\.NCCL_WIN_ENABLE="):
        asked(other={"NCCL_WIN_ENABLE": value})


@pytest.mark.parametrize("wanted", [1, 2])
@pytest.mark.parametrize(
    ("name", "value", "forbids"),
    [
        ("NCCL_NVLS_ENABLE", "0", True),
        ("NCCL_NVLS_ENABLE", " 0", True),
        ("NCCL_NVLS_ENABLE", "00", True),
        ("NCCL_NVLS_ENABLE", "1", False),
        ("NCCL_NVLS_ENABLE", "2", False),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", True),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0", False),
        ("NVSHMEM_DISABLE_NVLS", "1", True),
        ("NVSHMEM_DISABLE_NVLS", "true", True),
        ("NVSHMEM_DISABLE_NVLS", "Y", True),
        ("NVSHMEM_DISABLE_NVLS", "0", False),
        ("NVSHMEM_DISABLE_NVLS", "false", False),
        ("OTHER", "1", False),
    ],
)
def test_multicast_is_refused_where_the_environment_forbids_it(name, value, forbids, wanted):
    around = {name: value, "NCCL_DEBUG": "INFO"}
    for allowed in (Nccl(), Nccl(nvls_enable=0), Nccl(algo="Ring")):
        refuse_multicast(nccl_settings(allowed)[0], around)
    variables = asked(nvls_enable=wanted)
    if not forbids:
        refuse_multicast(variables, around)
        return
    with pytest.raises(Refused, match=r"possible here: null and 0$") as refused:
        refuse_multicast(variables, around)
    says = f"nccl.nvls_enable={wanted}: the environment forbids NVLink multicast ({name}="
    assert str(refused.value).startswith(says)
