"""Decision trees as files of Kaldi (`tree`), in both directions.

Kaldi's tree is one map from events to pdfs. The keys of an event are positions of the window, with phones as values,
and -1, with the number of the HMM state (its pdf-class). A node is a constant CE, a table TE by the value of one key,
or a split SE by whether the value is in a set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asr_am.data.kaldi_binary import KaldiReader, KaldiWriter
from asr_am.errors import InputError
from asr_am.hmm.tree import DecisionTree, Node, Root, Split

STATE = -1  # key of the HMM state
REMEDY = "give a complete file of a GMM system"


@dataclass(frozen=True)
class _Table:
    key: int
    children: tuple[_Event | None, ...]


@dataclass(frozen=True)
class _Set:
    key: int
    values: frozenset[int]
    yes: _Event
    no: _Event


_Event = int | _Table | _Set


def read_tree(path: Path, states_P: Mapping[int, int]) -> DecisionTree:
    """Reads a tree.

    Raises:
        InputError: the file is damaged, has no pdf for a phone's state, or a window of other than 1 or 3 phones.
    """
    reader = KaldiReader(path, REMEDY)
    reader.expect("ContextDependency")
    width, centre = reader.integer(), reader.integer()
    if (width, centre) not in ((1, 0), (3, 1)):
        raise InputError(f"{path}: a window of {width} phones around position {centre}; only monophones and triphones")
    if reader.expect("ToPdf", "ToLength") == "ToLength":  # of old files
        _read_event(reader)
        reader.expect("ToPdf")
    event = _read_event(reader)
    reader.expect("EndContextDependency")
    try:
        roots = [
            Root((phone,), tuple(_specialise(event, {centre: phone, STATE: state}) for state in range(count)))
            for phone, count in sorted(states_P.items())
        ]
        return DecisionTree(width, tuple(roots))
    except ValueError as error:
        raise InputError(f"{path}: {error}; {REMEDY}") from error


def _read_event(reader: KaldiReader) -> _Event | None:
    kind = reader.expect("NULL", "CE", "TE", "SE")
    if kind == "NULL":
        return None
    if kind == "CE":
        return reader.integer()
    key = reader.integer()
    if kind == "TE":
        size = reader.integer(signed=False)
        reader.expect("(")
        children = tuple(_read_event(reader) for _ in range(size))
        reader.expect(")")
        return _Table(key, children)
    values = frozenset(reader.integers())
    reader.expect("{")
    yes, no = _read_event(reader), _read_event(reader)
    reader.expect("}")
    if yes is None or no is None:
        raise reader.error("a split without an answer")
    return _Set(key, values, yes, no)


def _specialise(event: _Event | None, known: Mapping[int, int]) -> Node:
    """Returns the part of a map that remains where the values of some keys are known."""
    if event is None:
        raise ValueError(f"no pdf for {dict(known)}")
    if isinstance(event, int):
        return event
    if isinstance(event, _Set):
        if event.key in known:
            return _specialise(event.yes if known[event.key] in event.values else event.no, known)
        return Split(event.key, event.values, _specialise(event.yes, known), _specialise(event.no, known))
    if event.key in known:
        value = known[event.key]
        return _specialise(event.children[value] if value < len(event.children) else None, known)
    chosen = [(value, child) for value, child in enumerate(event.children) if child is not None]
    node = _specialise(chosen[-1][1], known)
    for value, child in reversed(chosen[:-1]):
        node = Split(event.key, frozenset([value]), _specialise(child, known), node)
    return node


def write_tree(path: Path, tree: DecisionTree) -> None:
    """Writes a tree as a table by the centre phone, of tables by the state."""
    writer = KaldiWriter()
    writer.token("ContextDependency")
    centre = tree.width // 2
    writer.integer(tree.width, centre)
    writer.token("ToPdf")
    root_of = {phone: root for root in tree.roots for phone in root.phones}
    writer.token("TE")
    writer.integer(centre)
    writer.unsigned(max(root_of) + 1)
    writer.token("(")
    for phone in range(max(root_of) + 1):
        if phone not in root_of:
            writer.token("NULL")
            continue
        nodes = root_of[phone].states
        writer.token("TE")
        writer.integer(STATE)
        writer.unsigned(len(nodes))
        writer.token("(")
        for node in nodes:
            _write_node(writer, node)
        writer.token(")")
    writer.token(")", "EndContextDependency")
    writer.save(path)


def _write_node(writer: KaldiWriter, node: Node) -> None:
    if not isinstance(node, Split):
        writer.token("CE")
        writer.integer(node)
        return
    writer.token("SE")
    writer.integer(node.position)
    writer.integers(sorted(node.phones))
    writer.token("{")
    for child in (node.yes, node.no):
        _write_node(writer, child)
    writer.token("}")
