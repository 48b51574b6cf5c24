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


def test_all_fields_at_once_through_hydra():
    values = {name: a_value(field) for name, field in FIELDS.items()}
    variables, notices = composed(*(f"nccl.{name}={value}" for name, value in values.items()))
    assert variables == {f"NCCL_{name.upper()}": str(value) for name, value in values.items()}
    assert notices == []
    assert all(field.metadata["help"] for field in FIELDS.values())


def test_nothing_asked_is_nothing_set():
    assert composed() == ({}, [])
    assert composed("nccl.p2p_level=null", "nccl.p2p_disable=null") == ({}, [])


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
            with pytest.raises(Refused, match=f"nccl.{name}=FOO: accepted are "):
                asked(**{name: "FOO"})
        if least is not None:
            assert asked(**{name: least}) == {variable: str(least)}
            said = rf"nccl.{name}=.*: accepted is a whole number of at least {least} and"
            for value in (least - 1, most + 1, least + 0.5, float("nan"), True, "x"):
                with pytest.raises(Refused, match=said):
                    asked(**{name: value})


@pytest.mark.parametrize("field", ["p2p_level", "net_gdr_level"])
def test_legacy_integers_are_translated_with_a_notice(field):
    for number, word in enumerate(("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")):
        variables, notices = composed(f"nccl.{field}={number}")
        assert variables == {f"NCCL_{field.upper()}": word}
        said = f"nccl.{field}={number} is NCCL's legacy number for {word}; {word} is used"
        assert notices == [said]


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
def test_unknown_words_and_collectives_of_a_selection_are_refused(name):
    for text in (
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
    ):
        with pytest.raises(Refused, match=f"nccl.{name}="):
            asked(**{name: text})
    said = "'alltoall' is no collective; accepted are " + ", ".join(FUNCTIONS).lower()
    with pytest.raises(Refused, match=said):
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


@pytest.mark.parametrize("what", ["nchannels", "ctas", "p2p_nchannels"])
def test_a_least_above_its_most_is_refused(what):
    low, high = f"min_{what}", f"max_{what}"
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


FORBIDDEN = {
    "a library": "NET_PLUGIN TUNER_PLUGIN ENV_PLUGIN GIN_PLUGIN NEW_PLUGIN IBVERBS_LIB",
    "files": "TOPO_FILE TOPO_DUMP_FILE GRAPH_DUMP_FILE CONF_FILE NEW_FILE",
    "meet elsewhere": "COMM_ID HOSTID MNNVL_UUID NEW_ADDR",
    "Ringside itself": "DEBUG DEBUG_SUBSYS RAS_ENABLE",
    "multicast": "NVLS_NEW MULTICAST_ENABLE SYM_MULTIMEM",
}
FOREIGN = ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "PATH", "TORCH_LOGS", "CUDA_X", "", "A=B")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((f"NCCL_{name}", what) for what, names in FORBIDDEN.items() for name in names.split()),
        *((name, "NCCL's variables") for name in FOREIGN),
    ],
)
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
