"""The table of NCCL settings: what each field becomes, what it accepts, and what never reaches a rank."""

import dataclasses
from pathlib import Path

import pytest
from hydra import compose
from hypothesis import given, settings
from hypothesis import strategies as some
from omegaconf import OmegaConf

from conf.command_line import normalise
from conf.nccl import (
    ALGORITHMS,
    FIELDS,
    FUNCTIONS,
    LEVELS,
    OTHERS,
    PROTOCOLS,
    Nccl,
    in_table,
    refuse_multicast,
    unknown_setting,
)
from conf.nccl import settings as nccl_settings
from conf.options import Refused

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("hydra")


def composed(*arguments):
    """The variables that a command line asks for, and the notices."""
    config = OmegaConf.to_object(compose("config", overrides=normalise(arguments)))
    return nccl_settings(config.nccl)


def asked(**fields):
    return nccl_settings(Nccl(**fields))[0]


def a_value(field):
    """A value that the field's own metadata accepts."""
    free = {"algo": "Ring", "proto": "LL128", "ib_hca": "=mlx5_0:1", "socket_ifname": "^docker"}
    return next(iter(field.metadata["words"]), None) or field.metadata["most"] or free[field.name]


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.name)
def test_a_field_becomes_its_variable(field):
    value = a_value(field)
    assert asked(**{field.name: value}) == {f"NCCL_{field.name.upper()}": str(value)}
    assert field.metadata["help"]


def test_all_fields_at_once_through_hydra():
    values = {name: a_value(field) for name, field in FIELDS.items()}
    variables, notices = composed(*(f"nccl.{name}={value}" for name, value in values.items()))
    assert variables == {f"NCCL_{name.upper()}": str(value) for name, value in values.items()}
    assert notices == []


def test_nothing_asked_is_nothing_set():
    assert composed() == ({}, [])
    assert composed("nccl.p2p_level=null", "nccl.p2p_disable=null") == ({}, [])


@pytest.mark.parametrize(
    "field", [f for f in FIELDS.values() if f.metadata["words"]], ids=lambda field: field.name
)
def test_words_are_case_sensitive_as_nccl_has_them(field):
    for word in field.metadata["words"]:
        assert asked(**{field.name: word}) == {f"NCCL_{field.name.upper()}": word}
        if (other := word.swapcase()) != word:
            with pytest.raises(Refused, match=f"case matters: write {word}"):
                asked(**{field.name: other})
    with pytest.raises(Refused, match=f"nccl.{field.name}=FOO: accepted are "):
        asked(**{field.name: "FOO"})


@pytest.mark.parametrize(
    "field",
    [f for f in FIELDS.values() if f.metadata["least"] is not None],
    ids=lambda field: field.name,
)
def test_numbers_stay_within_their_bounds(field):
    least, most = field.metadata["least"], field.metadata["most"]
    assert asked(**{field.name: least}) == {f"NCCL_{field.name.upper()}": str(least)}
    for value in (least - 1, most + 1, least + 0.5, float("nan"), True, "x"):
        with pytest.raises(
            Refused,
            match=rf"nccl.{field.name}=.*: accepted is a whole number of at least {least} and",
        ):
            asked(**{field.name: value})


@pytest.mark.parametrize("field", ["p2p_level", "net_gdr_level"])
@pytest.mark.parametrize(
    ("number", "word"),
    [("0", "LOC"), ("1", "PIX"), ("2", "PXB"), ("3", "PHB"), ("4", "SYS"), ("5", "SYS")],
)
def test_legacy_integers_are_translated_with_a_notice(field, number, word):
    variables, notices = composed(f"nccl.{field}={number}")
    assert variables == {f"NCCL_{field.upper()}": word}
    assert notices == [f"nccl.{field}={number} is NCCL's legacy number for {word}; {word} is used"]


def test_levels_that_are_neither_word_nor_legacy_number_are_refused():
    for value in ("-1", "6", "00", "LOC ", "loc", "NV18"):
        with pytest.raises(Refused, match="accepted are LOC, NVL, PIX, PXB, PHB or SYS"):
            asked(p2p_level=value)
    assert LEVELS == ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")


@pytest.mark.parametrize(
    "text",
    ["Ring", "ring", "Ring,Tree", "^Tree", "^NVLS,NVLSTree", "allreduce:tree", "allreduce:^ring", "Ring;allreduce:tree",
     "allreduce:tree;allgather:ring", "allgather:PAT", "reducescatter:nvls", "Tree;allgather:ring;reducescatter:ring;"
     "broadcast:ring;reduce:ring"],
)  # fmt: skip
def test_selections_of_algorithms_that_every_collective_can_use(text):
    assert composed(f"nccl.algo={text}" if "," not in text else f"nccl.algo='{text}'")[0] == {
        "NCCL_ALGO": text
    }


@pytest.mark.parametrize(
    "text", ["Tree", "tree", "NVLS", "Tree,NVLS", "CollNetDirect", "PAT", "^Ring", "^ring,tree"]
)
def test_a_selection_without_ring_says_the_form_for_one_collective(text):
    with pytest.raises(Refused) as refused:
        asked(algo=text)
    assert str(refused.value).startswith(f"nccl.algo={text}: leaves ")
    assert f"nccl.algo=allreduce:{text.lower()}" in str(refused.value)


@pytest.mark.parametrize(
    "text", ["allgather:tree", "Ring;broadcast:tree", "reduce:NVLS", "allreduce:PAT"]
)
def test_an_algorithm_that_a_collective_does_not_have_is_refused(text):
    function = text.split(";")[-1].split(":")[0]
    with pytest.raises(Refused, match=f"leaves {function} without an algorithm"):
        asked(algo=text)


@pytest.mark.parametrize("name", ["algo", "proto"])
@pytest.mark.parametrize(
    "text",
    [
        "Foo",
        "Ring,Foo",
        "LL,Foo",
        "",
        ",",
        "^",
        "Ring;",
        "allreduce:",
        "Ring Tree",
        " LL",
        "Ring, Tree",
    ],
)
def test_unknown_words_of_a_selection_are_refused(name, text):
    with pytest.raises(Refused, match=f"nccl.{name}="):
        asked(**{name: text})


@pytest.mark.parametrize("name", ["algo", "proto"])
def test_unknown_collectives_are_refused_with_the_known_ones(name):
    with pytest.raises(
        Refused, match="'alltoall' is no collective; accepted are " + ", ".join(FUNCTIONS).lower()
    ):
        asked(**{name: "alltoall:ring"})


@pytest.mark.parametrize(
    "text", ["Simple", "ll", "LL,LL128", "^LL128", "allreduce:ll128", "Simple;allreduce:ll"]
)
def test_selections_of_protocols(text):
    assert asked(proto=text) == {"NCCL_PROTO": text}


def test_a_selection_without_any_protocol_is_refused():
    with pytest.raises(Refused, match="without a protocol"):
        asked(proto="^LL,LL128,Simple")


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    some.lists(
        some.tuples(
            some.sampled_from(["", "allreduce:", "allgather:", "broadcast:", "x:"]),
            some.sampled_from(["", "^"]),
            some.lists(
                some.sampled_from([*ALGORITHMS, *PROTOCOLS, "foo", ""]), min_size=1, max_size=3
            ).map(",".join),
        ).map("".join),
        min_size=1,
        max_size=3,
    ).map(";".join)
    | some.text(max_size=20)
)
def test_any_selection_is_kept_as_it_is_or_refused(text):
    for name in ("algo", "proto"):
        try:
            assert asked(**{name: text}) == {f"NCCL_{name.upper()}": text}
        except Refused as refused:
            assert str(refused).startswith(f"nccl.{name}=")


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("min_nchannels", "max_nchannels"),
        ("min_ctas", "max_ctas"),
        ("min_p2p_nchannels", "max_p2p_nchannels"),
    ],
)
def test_a_least_above_its_most_is_refused(low, high):
    with pytest.raises(Refused, match=f"nccl.{low}=8: accepted is at most nccl.{high}=4"):
        asked(**{low: 8, high: 4})
    assert len(asked(**{low: 4, high: 4})) == 2


@pytest.mark.parametrize("name", ["algo", "ib_hca", "socket_ifname"])
@pytest.mark.parametrize("text", ["", "a\nb", "a\0b", "é", "\x1b[31m", "a" * 501])
def test_free_text_is_printable_ascii(name, text):
    with pytest.raises(Refused, match=f"nccl.{name}="):
        asked(**{name: text})


def test_the_sharp_preset_sets_the_variables_of_the_plugin_s_page():
    assert composed("nccl=sharp")[0] == {
        "NCCL_COLLNET_ENABLE": "1",
        "NCCL_PLUGIN_P2P": "ib",
        "NCCL_SHARP_MAX_COMMS": "1",
        "NCCL_IB_PCI_RELAXED_ORDERING": "0",
        "SHARP_COLL_ENABLE_SAT": "1",
    }
    changed, _ = composed(
        "nccl=sharp", "nccl.sharp_max_comms=2", "nccl.other.SHARP_COLL_ENABLE_SAT=0"
    )
    assert (changed["NCCL_SHARP_MAX_COMMS"], changed["SHARP_COLL_ENABLE_SAT"]) == ("2", "0")


def test_every_other_variable_of_nccl_s_gets_in_and_its_effect_is_not_checked():
    for name in OTHERS:
        assert asked(other={name: "1"}) == {name: "1"}
    assert not any(map(in_table, OTHERS))
    said = "nccl.other.NCCL_WIN_ENABLE=1: its effect is not checked"
    for typed in (
        "nccl.other.NCCL_WIN_ENABLE=1",
        "nccl.other.win_enable=1",
        "nccl.env.NCCL_WIN_ENABLE=1",
    ):
        assert composed(typed) == ({"NCCL_WIN_ENABLE": "1"}, [said])
    assert composed("nccl.other.cta_policy=null") == ({}, [])
    variables, (notice,) = composed("nccl.other.NCCL_OF_A_LATER_RELEASE=7")
    assert variables == {"NCCL_OF_A_LATER_RELEASE": "7"}
    assert notice.endswith(
        "NCCL up to 2.30 has no such variable, and NCCL ignores what it does not know"
    )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(
            (f"NCCL_{one}_PLUGIN", "a library")
            for one in ("NET", "TUNER", "PROFILER", "ENV", "GIN", "NEW")
        ),
        ("NCCL_IBVERBS_LIB", "a library"),
        *(
            (f"NCCL_{one}_FILE", "files")
            for one in ("TOPO", "TOPO_DUMP", "GRAPH_DUMP", "CONF", "NEW")
        ),
        *(
            (f"NCCL_{one}", "meet elsewhere")
            for one in ("COMM_ID", "HOSTID", "MNNVL_UUID", "NEW_ADDR")
        ),
        *((f"NCCL_{one}", "Ringside itself") for one in ("DEBUG", "DEBUG_SUBSYS", "RAS_ENABLE")),
        *((f"NCCL_{one}", "multicast") for one in ("NVLS_NEW", "MULTICAST_ENABLE", "SYM_MULTIMEM")),
        *(
            (one, "NCCL's variables")
            for one in (
                "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "PATH", "TORCH_LOGS",
                "CUDA_X", "", "A=B",
            )
        ),
    ],
)  # fmt: skip
def test_variables_that_load_write_redirect_or_multicast_never_pass(name, what):
    with pytest.raises(Refused) as refused:
        asked(other={name: "x"})
    assert str(refused.value).startswith(f"nccl.other.{name}=x: ")
    assert what in str(refused.value)
    assert name.removeprefix("NCCL_").lower() not in FIELDS


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("NCCL_P2P_LEVEL", "NCCL_P2P_LEVEL has a setting of its own; write nccl.p2p_level=1"),
        ("nvls_enable", "NCCL_NVLS_ENABLE has a setting of its own; write nccl.nvls_enable=1"),
        ("NCCL_WIN_ENABEL", "NCCL up to 2.30 has no such variable (did you mean NCCL_WIN_ENABLE?)"),
        (
            "WIN_ENABEL",
            "accepted are names of NCCL's variables; they begin with NCCL_ (did you mean NCCL_WIN_ENABLE?)",
        ),
        ("NCCL_P2P_LEVLE", "NCCL up to 2.30 has no such variable (did you mean NCCL_P2P_LEVEL?)"),
    ],
)
def test_a_name_of_the_table_or_a_misspelled_one_is_told(typed, said):
    with pytest.raises(Refused) as refused:
        asked(other={typed: 1})
    assert str(refused.value).startswith(f"nccl.other.{typed}=1: {said}")


def test_a_setting_that_is_not_in_the_table_is_told_how_it_gets_in():
    assert unknown_setting("win_enable", "1").endswith(
        "nccl.other.NCCL_WIN_ENABLE=1 sets it, and its effect is not checked"
    )
    assert (
        unknown_setting("P2P_LEVEL", "LOC") == "nccl.P2P_LEVEL=LOC: accepted is nccl.p2p_level=LOC"
    )
    assert "NET_PLUGIN makes NCCL load a library" in unknown_setting("net_plugin", "x")
    assert "(did you mean nvls_enable?)" in unknown_setting("nvls_enabel", "1")


@pytest.mark.parametrize("value", ["", "a\nb", "a\0b", "é", "x" * 201, True, ["a\nb"]])
def test_values_of_other_variables_are_printable_ascii(value):
    with pytest.raises(Refused, match=r"nccl\.other\.NCCL_WIN_ENABLE="):
        asked(other={"NCCL_WIN_ENABLE": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1"),
     ("NCCL_NVLS_ENABLE", " 0"), ("NCCL_NVLS_ENABLE", "00"), ("NVSHMEM_DISABLE_NVLS", "true"), ("NVSHMEM_DISABLE_NVLS", "Y")],
)  # fmt: skip
@pytest.mark.parametrize("wanted", [1, 2])
def test_multicast_is_refused_where_the_environment_forbids_it(name, value, wanted):
    with pytest.raises(Refused) as refused:
        refuse_multicast(asked(nvls_enable=wanted), {name: value, "NCCL_DEBUG": "INFO"})
    message = str(refused.value)
    assert message.startswith(
        f"nccl.nvls_enable={wanted}: the environment forbids NVLink multicast ({name}="
    )
    assert message.endswith("accepted here are null and 0")
    for allowed in (Nccl(), Nccl(nvls_enable=0), Nccl(algo="Ring")):
        refuse_multicast(nccl_settings(allowed)[0], {name: value})


def test_multicast_is_accepted_where_nothing_forbids_it():
    allowing = {
        "NCCL_NVLS_ENABLE": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0",
        "NVSHMEM_DISABLE_NVLS": "0",
    }
    for surrounding in ({}, allowing, {"NVSHMEM_DISABLE_NVLS": "false"}, {"NCCL_NVLS_ENABLE": "2"}):
        refuse_multicast(asked(nvls_enable=1), surrounding)


def test_every_field_is_untouched_by_default():
    assert all(getattr(Nccl(), field.name) in (None, {}) for field in dataclasses.fields(Nccl))
