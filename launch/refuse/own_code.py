"""Refuse code that cannot be called as it will be, by its text: no rank has to start to find that out.

What the text does not show (a decorator, a class from a library, what its own imports do) is left to the rank, which says it too.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from conf.cell import SAMPLES, Cell
from conf.options import Refused, closest
from conf.rules import RULES
from conf.targets import OURS, defines, is_there, locate_without_torch, source_file, split

STRATEGY, OWN_MODEL = "trainers.strategy.Strategy", "trainers.batches.OwnModel"
OF_EVERYONE = (
    "torch",
    "abc",
    "typing",
    "object",
    "builtins",
)  # where a class ends that is none of ours
WITHOUT_INIT = ("abc", "object")
NO_ARGUMENTS = cast(ast.FunctionDef, ast.parse("def __init__(self): ...").body[0])
Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Called:
    """One name that a rank will call: where it was read, with which keywords, and what a class must be."""

    field: str
    dotted: str
    keywords: tuple[str, ...]
    base: str = ""  # empty: anything
    more: str = ""  # where further keywords come from


def refuse_wrong_code(cells: Sequence[Cell]) -> None:
    """Refuse cells whose model, loader or strategy cannot be called, or lacks a method. Raises Refused."""
    for name, exchange in dict.fromkeys((cell.strategy["name"], _exchange(cell)) for cell in cells):
        if exchange:
            _refuse_exchange(f"strategy={name}: code.exchange", exchange)
    for one in dict.fromkeys(one for cell in cells for one in _called(cell)):
        _refuse_imports(one.field, one.dotted)
        found = _definition(one.field, one.dotted)
        if isinstance(found, ast.ClassDef):
            family: dict[str, ast.ClassDef] = {}
            ends = list(_lineage(one.dotted.replace(":", "."), family))
            _refuse_class(one, family, ends)
            _refuse_call(one, found, _init(family, ends))
        elif found is not None:
            _refuse_call(one, found, found)


def _exchange(cell: Cell) -> str:
    return str(cell.declared.get("strategy", {}).get("exchange", ""))


def _called(cell: Cell) -> Iterator[Called]:
    """Yield what a rank will call: a strategy, and a model and a loader of the user's own."""
    own = {group: rules["target"] for group, rules in cell.declared.items()}
    if "model" in own:
        samples = cell.model.inputs == SAMPLES
        words = (*(() if samples else ("classes", "channels")), *cell.model.options)
        yield Called(
            "model.builder", own["model"], words, OWN_MODEL if samples else "", "model.options"
        )
    if "data" in own:
        words = ("batch_size", "rank", "world_size", "seed", *cell.data["options"])
        yield Called("data.loader", own["data"], words, more="data.options")
    if "strategy" in own:
        words = tuple(name for name in cell.strategy if name != "name")
        field = f"strategy={cell.strategy['name']}: _target_"
        yield Called(field, own["strategy"], words, STRATEGY, "the options of its YAML")


def _refuse_exchange(field: str, dotted: str) -> None:
    """Refuse what is no Exchange. Ringside's own are looked for by their text: to import them takes the launcher time."""
    source_file(field, dotted)
    if dotted.partition(".")[0] in OURS:
        return
    from analysis.prediction.strategies import Exchange  # with numpy, which a plan does not need

    try:
        found = locate_without_torch(dotted)
    except Refused as error:
        raise Refused(f"{field}={error}") from None
    if not isinstance(found, Exchange):
        raise Refused(
            f"{field}={dotted}: accepted is an analysis.prediction.strategies.Exchange, as by_collective returns"
        )


def _refuse_imports(field: str, dotted: str) -> None:
    """Refuse code that imports from Ringside what is not there; of other modules only a rank knows."""
    for one in _tree(field, dotted).body:
        if (
            isinstance(one, ast.ImportFrom)
            and one.module
            and one.module.partition(".")[0] in OURS
            and not one.level
        ):
            names = [name.name for name in one.names if name.name != "*"]
            if missing := [name for name in names if not is_there(f"{one.module}.{name}")]:
                raise Refused(
                    f"{field}={dotted}: imports {missing[0]} from {one.module}, which has no such name"
                )


def _refuse_call(one: Called, found: Definition, called: ast.FunctionDef | None) -> None:
    """Refuse a function, or a class by its __init__, that does not take the keywords, or needs others; None: not known."""
    if called is None or called.decorator_list or called.args.posonlyargs:
        return
    needed, optional, takes_any = _arguments(called, skipped=int(found is not called))
    as_called = f"{found.name}({', '.join(f'{name}=…' for name in one.keywords)})"
    unknown = [name for name in one.keywords if name not in (*needed, *optional) and not takes_any]
    missing = [name for name in needed if name not in one.keywords]
    if unknown:
        hint = closest(unknown[0], RULES)
        if "classes" in unknown:
            hint = "; a model that makes its own batches is asked for with model.inputs=samples"
        raise Refused(
            f"{one.field}={one.dotted}: takes no {unknown[0]}, and is called as {as_called}{hint}"
        )
    if missing:
        raise Refused(
            f"{one.field}={one.dotted}: needs {missing[0]}, and is called as {as_called}; add it to {one.more}"
        )


def _init(family: dict[str, ast.ClassDef], ends: list[str]) -> ast.FunctionDef | None:
    """Return the __init__ of a class, its own or an inherited one; None where the text does not say."""
    if any(made.decorator_list or made.keywords for made in family.values()):
        return None
    inherited = (
        method for made in family.values() for method in _methods(made) if method.name == "__init__"
    )
    found = next(inherited, None)
    if found is None and all(end.partition(".")[0] in WITHOUT_INIT for end in ends):
        return NO_ARGUMENTS
    return found


def _arguments(called: ast.FunctionDef, skipped: int) -> tuple[list[str], list[str], bool]:
    """Return (arguments without a default, those with one, whether any is taken), without the first `skipped`."""
    arguments = called.args
    names = [one.arg for one in arguments.args][skipped:]
    plain = len(names) - min(len(arguments.defaults), len(names))
    keyword_only = list(
        zip((one.arg for one in arguments.kwonlyargs), arguments.kw_defaults, strict=True)
    )
    needed = names[:plain] + [name for name, default in keyword_only if default is None]
    optional = names[plain:] + [name for name, default in keyword_only if default is not None]
    return needed, optional, arguments.kwarg is not None


def _refuse_class(one: Called, family: dict[str, ast.ClassDef], ends: list[str]) -> None:
    """Refuse a class that is no subclass of its base, or that lacks a method which the base demands."""
    if not one.base:
        return
    name, short = split(one.dotted)[1], one.base.rpartition(".")[2]
    if one.base not in family:
        if all(end.partition(".")[0] in OF_EVERYONE for end in ends):
            raise Refused(
                f"{one.field}={one.dotted}: {name} is no {short}; accepted is a subclass of {one.base}, or a function that "
                "returns one"
            )
        return
    has = {
        method.name
        for made in family.values()
        for method in _methods(made)
        if not _is_abstract(method)
    }
    demanded = [method.name for method in _methods(family[one.base]) if _is_abstract(method)]
    if lacks := [method for method in demanded if method not in has]:
        raise Refused(
            f"{one.field}={one.dotted}: {name} has no {lacks[0]}; a subclass of {short} defines {', '.join(demanded)}"
        )


def _lineage(dotted: str, family: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Put a class and the classes that it is made of into `family`, by name; yield the names at which its text ends."""
    if dotted in family:
        return
    try:
        tree = _tree("", dotted)
    except Refused:
        yield dotted
        return
    module, name = split(dotted)
    imported = dict(_imports(tree, module))
    found = _last(tree, name)
    if isinstance(found, ast.ClassDef):
        family[dotted] = found
        for base in found.bases:
            head, _, rest = ast.unparse(base).partition(".")
            elsewhere = head if head == "object" or defines(tree.body, head) else f"builtins.{head}"
            full = imported.get(
                head, f"{module}.{head}" if _last(tree, head) is not None else elsewhere
            )
            yield from _end_or_lineage(f"{full}.{rest}" if rest else full, family)
    elif name in imported:
        yield from _end_or_lineage(imported[name], family)
    else:
        yield dotted


def _end_or_lineage(dotted: str, family: dict[str, ast.ClassDef]) -> Iterator[str]:
    if dotted.partition(".")[0] in OF_EVERYONE or "." not in dotted:
        yield dotted
    else:
        yield from _lineage(dotted, family)


def _tree(field: str, dotted: str) -> ast.Module:
    return ast.parse(source_file(field, dotted).read_bytes())


def _definition(field: str, dotted: str) -> Definition | None:
    """Return the only definition of a name; None for a name that is imported, assigned or defined twice. Raises Refused."""
    return _last(_tree(field, dotted), split(dotted)[1])


def _last(tree: ast.Module, name: str) -> Definition | None:
    found = [
        one
        for one in tree.body
        if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == name
    ]
    return found[0] if len(found) == 1 else None


def _imports(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Yield (name in the module, dotted name) of what a module imports."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Import):
            for name in one.names:
                first = name.name.partition(".")[0]
                yield (name.asname, name.name) if name.asname else (first, first)
        elif isinstance(one, ast.ImportFrom):
            above = module.rsplit(".", one.level)[0] if one.level else ""
            source = ".".join(part for part in (above, one.module) if part)
            yield from ((name.asname or name.name, f"{source}.{name.name}") for name in one.names)


def _methods(found: ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in found.body if isinstance(one, ast.FunctionDef)]


def _is_abstract(method: ast.FunctionDef) -> bool:
    return any(
        ast.unparse(one).rpartition(".")[2] == "abstractmethod" for one in method.decorator_list
    )
